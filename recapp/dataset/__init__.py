"""Logs in, batches out. The only room that knows pyarrow; it knows neither the tables of ranks nor
sizes of tables.
"""
