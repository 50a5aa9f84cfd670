"""Tasks: the labels, outputs, loss, metrics and best metric that a model is trained with."""
