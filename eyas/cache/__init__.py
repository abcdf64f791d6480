"""Which token lives in which slot, and what is stored there. Knows no requests and no models."""
