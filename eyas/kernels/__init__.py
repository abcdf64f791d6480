"""Compiled kernels: numbers and tensors in, numbers and tensors out."""
