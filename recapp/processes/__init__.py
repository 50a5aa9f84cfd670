"""Ranks as processes of an operating system: their start, environment, memory, signals and end."""
