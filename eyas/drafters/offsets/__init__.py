"""Drafters over heads that each guess the token at one offset: Medusa and Hydra, with trees of a fixed shape."""
