"""The measurements of `python -m recapp.bench`: workloads, timing in rounds, and the systems that
recapp is compared with.
"""
