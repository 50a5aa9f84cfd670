"""Local arithmetic of the embedding engine: group, pool, update. One file per backend; the torch
reference defines the result.
"""
