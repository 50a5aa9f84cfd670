"""Jagged data: what travels from a data set to a model."""
