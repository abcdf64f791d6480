"""Corpora that drafters look their guesses up in: text in, suffix arrays on disk out. Knows no torch and no network."""
