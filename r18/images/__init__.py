"""From photographs to what networks take, and from logits to labels."""
