"""Price and choose sharding plans, without a process group or a device: a laptop plans for a
cluster.
"""
