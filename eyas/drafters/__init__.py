"""Drafters: committed tokens (and features) in, draft trees out. They know neither the engine nor the network."""
