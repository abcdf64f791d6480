"""One target over several processes. Knows no sequences and no services."""
