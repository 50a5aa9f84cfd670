"""Ranks as processes of the operating system: their start, environment, memory, signals and end."""
