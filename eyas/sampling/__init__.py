"""Logits in, tokens out: every rule of drawing and accepting tokens."""
