"""What a model is trained for: labels, loss, metrics, outputs by name, what "best" means."""
