"""From photographs to network inputs, and from logits to labels."""
