"""Speculative sampling with a small model: committed tokens in, draft trees or sampled chains out."""
