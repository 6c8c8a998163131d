"""A run on disk: its settings, history, results and checkpoints; a personal model and its file."""
