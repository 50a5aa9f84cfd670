"""Widths that kernels of all backends share; who reads them needs neither torch nor numba."""

CACHE_LINE_BYTES = 64
SQUARE_BLOCK = 64  # columns: the default width of a vertical strip (sharding/sharding_types.py)
