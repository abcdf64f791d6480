"""Kernels in NumPy and torch, with the signatures of the compiled ones."""
