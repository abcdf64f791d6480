"""Checks of a user's own models: output equality and the wiring of a draft head, each with its evidence."""
