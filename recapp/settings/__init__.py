"""The settings that exist, the values that they take, and their texts in `--help` and errors."""
