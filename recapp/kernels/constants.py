"""Numbers on which all backends agree. They have a file of their own, so that a kernel that reads
one of them gets no other source file (`numba_cache.py`).
"""

CACHE_LINE_BYTES = 64
SQUARE_BLOCK = 64  # columns: the default width of a vertical strip (sharding/sharding_types.py)
RUN_BITS = 6  # the highest bits of a position are its run; the smallest position is in run 0
