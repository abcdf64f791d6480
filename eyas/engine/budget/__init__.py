"""How large the draft trees of the next step may be: what steps have cost and gained so far in, nodes by request out."""
