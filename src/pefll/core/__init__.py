"""Helpers that every other package may import: errors, files, randomness, trees, wording. core imports no other."""
