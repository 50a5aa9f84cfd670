"""Embedding tables on one process: configs, id rules, start values, and the unsharded collections
with which every test compares.
"""
