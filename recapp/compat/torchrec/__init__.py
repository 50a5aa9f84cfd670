"""Adapters for programs that were written for TorchRec."""
