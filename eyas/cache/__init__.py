"""Which token lives in which slot of the KV cache, and who may reuse it."""
