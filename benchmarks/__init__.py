"""Measurements: how fast, against whom, and whether it grows."""
