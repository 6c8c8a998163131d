"""Counts how often certificates fail in synthetic worlds, whose client environment is known."""
