"""Measures how PeFLL's training converges on a problem whose constants are known, beside Theorem 3.1."""
