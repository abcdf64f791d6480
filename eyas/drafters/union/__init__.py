"""Two drafters at once: both are told the same, their trees become one."""
