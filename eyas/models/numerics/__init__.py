"""What makes one number of a target depend on as little as possible. Tensors and modules only; knows no sequences."""
