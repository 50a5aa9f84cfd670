"""The local functions of the embedding engine: group, pool, update. Each backend has its own files;
the torch reference defines the results.
"""
