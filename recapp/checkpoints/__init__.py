"""Checkpoints: logical tables cut into rectangles, which load under any plan on any number of
ranks.
"""
