"""Layers of targets: attention over slots, fused projections, experts."""
