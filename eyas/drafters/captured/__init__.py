"""Whole draft trees as captured CUDA graphs, beside the plain path that launches them kernel by kernel."""
