"""A workload in, a dated report out."""
