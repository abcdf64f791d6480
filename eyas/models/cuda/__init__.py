"""The target on CUDA: a kernel for attention, captured passes. Beside it stands the plain path."""
