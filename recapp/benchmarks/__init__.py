"""What `python -m recapp.bench` measures: workloads, timing in rounds, and those that recapp is
compared with.
"""
