"""What an embedding table is on one process: configs, id rules, initial values, and the unsharded
collection every test compares with.
"""
