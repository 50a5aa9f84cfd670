"""From a command line to objects that run: the only room that knows Hydra."""
