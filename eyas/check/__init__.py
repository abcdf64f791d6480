"""Checks on a user's own models: claims in, a verdict with its evidence out."""
