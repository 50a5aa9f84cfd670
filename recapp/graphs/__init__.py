"""Training steps, and calls of a model, as CUDA graphs."""
