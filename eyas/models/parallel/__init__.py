"""Tensor parallelism: shards of a target, and the processes that hold them."""
