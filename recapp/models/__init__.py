"""Models: plain modules, forward(batch) -> logits_B. They know no ranks."""
