"""Chooses the sizes of draft trees: costs, chances and the choice."""
