"""Train sharded tables: requests, lookup, fused update and the stores that hold the rows."""
