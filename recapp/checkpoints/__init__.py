"""A checkpoint is logical tables cut into rectangles; it loads under any plan on any number of
ranks.
"""
