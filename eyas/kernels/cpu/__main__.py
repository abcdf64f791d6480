"""Compiles all kernels of the CPU for this processor: `python -m eyas.kernels.cpu`."""

from eyas.kernels.cpu import drafting, eagle_trees, layers, lookups, packing, trees

for module in (layers, drafting, eagle_trees, lookups, packing, trees):
    module.compile_kernels()
