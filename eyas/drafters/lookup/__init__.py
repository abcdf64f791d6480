"""Drafters without a network, which continue texts from what they have seen."""
