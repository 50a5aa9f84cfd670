"""Read and write stored models: checkpoints, which load under any plan on any number of ranks, and
artefacts, which servers load.
"""
