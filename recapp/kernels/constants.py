"""Numbers on which all backends agree: they stand alone, so that what reads one of them is made of
nothing else (`kernel_sources.py`).
"""

CACHE_LINE_BYTES = 64
SQUARE_BLOCK = 64  # columns; as wide as a vertical strip is by default (sharding/sharding_types.py)
RUN_BITS = 6  # the highest bits of a position are its run, 0 at the smallest position
