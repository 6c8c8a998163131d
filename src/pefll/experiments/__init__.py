"""One small file per experiment: what to run, and how to show it."""
