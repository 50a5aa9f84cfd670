"""Raw logs before there is a model: what a file holds, and the settings that train on it."""
