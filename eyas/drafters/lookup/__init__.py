"""Drafters without a model: what followed the same tokens before, in the context, a corpus or the target's own guesses."""
