"""Choose, price and explain sharding plans. Pure: a laptop plans for a cluster."""
