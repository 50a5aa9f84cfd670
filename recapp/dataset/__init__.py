"""Read logs and make batches. This package knows files and pyarrow; it knows neither the tables of
ranks nor the sizes of tables.
"""
