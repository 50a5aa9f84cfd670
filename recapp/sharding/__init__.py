"""Plans as rectangles and the layout that follows from them. Pure: no process group, no tensors of
tables.
"""
