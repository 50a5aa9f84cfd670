"""The measurements of `python -m recapp.bench`: workloads, timing in rounds, and comparisons with
other systems.
"""
