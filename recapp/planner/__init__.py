"""Which plan: topology, memory, rules. Pure: a laptop plans for a cluster."""
