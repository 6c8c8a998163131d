"""Measurements of speed, memory and privacy, and comparisons with other software."""
