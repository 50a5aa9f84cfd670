"""A trained model behind HTTP: the Open Inference protocol, Arrow, batches made of requests."""
