"""Price and choose sharding plans. Pure: a laptop plans for a cluster."""
