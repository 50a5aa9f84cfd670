"""A trained model without its trainer: scores of raw rows, small and mapped tables, artefacts."""
