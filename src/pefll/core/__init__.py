"""What everything else may use and what uses nothing of ours: errors, files, randomness, trees, words."""
