"""Compiles all kernels of the CPU for this processor: `python -m eyas.kernels.cpu`."""

from eyas.kernels.cpu import drafting, layers, lookups, sampling

for module in (layers, drafting, lookups, sampling):
    module.compile_kernels()
