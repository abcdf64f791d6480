"""The target on CUDA: an attention kernel and captured forward passes, beside the plain path."""
