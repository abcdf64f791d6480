"""Draft heads: features and tokens in, draft logits out, in the layouts of their authors. Knows no sessions."""
