"""Drafting ahead: trees grown while the target verifies."""
