"""Jagged data: the batches that a data set hands to a model."""
