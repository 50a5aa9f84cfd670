"""Parquet in, batches out. The only room that knows pyarrow; it knows no ranks' tables and no table
sizes.
"""
