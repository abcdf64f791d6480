"""Tensors in, tensors out. Knows no sequences and no network."""
