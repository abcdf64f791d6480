"""Heads that each guess the token at one offset from the target's final state: Medusa, Hydra."""
