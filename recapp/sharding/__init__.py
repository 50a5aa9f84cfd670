"""Plans as rectangles, and the layout that follows from a plan. All functions are pure: they use no
process group and no tensors of tables.
"""
