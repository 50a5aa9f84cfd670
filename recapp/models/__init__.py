"""Plain modules: forward(dense_BI, KeyedJaggedTensor) -> logits_B. They know no ranks."""
