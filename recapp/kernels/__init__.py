"""The local functions of the embedding engine: group, pool, update. Each backend has its own files;
the torch reference defines the results.
"""

CACHE_LINE_BYTES = 64
SQUARE_BLOCK = 64  # columns: the default width of a vertical strip (sharding/sharding_types.py)
