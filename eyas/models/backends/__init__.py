"""Backends that run the target's passes: plain PyTorch, compiled on the CPU, captured on CUDA."""
