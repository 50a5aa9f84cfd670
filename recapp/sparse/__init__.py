"""Jagged data: the batches that a data set gives to a model."""
