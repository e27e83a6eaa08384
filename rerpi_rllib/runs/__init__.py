"""One training run: its settings, the training itself, its checkpoints, and its evaluation."""
