"""Draft heads in the checkpoint formats of their authors: features and tokens in, draft logits out."""
