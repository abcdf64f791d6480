"""What the router tells of its requests."""
