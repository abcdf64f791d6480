"""Values that cross between processes: commits, draft trees, hashes of prefixes. Ints and bytes only."""
