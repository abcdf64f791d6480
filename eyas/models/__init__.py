"""The target model, its attention and the draft heads: tensors in, tensors out."""
