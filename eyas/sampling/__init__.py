"""From logits to tokens: every rule of drawing and accepting them."""
