"""Growing draft trees from scores of their nodes."""
