"""Slots of the KV cache: the token in each, and the sequences that may reuse it."""
