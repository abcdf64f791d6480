"""Corpora in which drafter `rest` looks up continuations, as suffix arrays on disk."""
