"""Kernels for CPUs, compiled with numba."""
