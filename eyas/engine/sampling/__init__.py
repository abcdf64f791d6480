"""What requests ask of their logits, the draw itself, and what is told of it. Knows no slots and no drafter."""
