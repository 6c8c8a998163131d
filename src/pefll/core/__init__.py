"""Helpers for all other packages: errors, files, randomness, trees, wording. This package imports none of them."""
