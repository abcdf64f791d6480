"""Kernels for GPUs, compiled with Triton."""
