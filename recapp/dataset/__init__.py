"""Parquet in, batches out. The only room that knows pyarrow; it knows neither ranks' tables nor
table sizes.
"""
