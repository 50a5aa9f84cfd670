"""Ranks as operating-system processes: their start, environment, memory, signals and end."""
