"""Serve a trained model over HTTP: the Open Inference protocol, Arrow, and dynamic batching."""
