"""Committed tokens (and features) in, draft trees out. Knows neither the target's engine nor the network."""
