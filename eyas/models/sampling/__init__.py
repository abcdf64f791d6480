"""From logits to tokens: penalties, laws, noise, exact ranking and log-probabilities. Tensors in, tensors out."""
