"""Guarantees with a stated confidence: intervals, PAC-Bayes bounds and convergence rates as plain formulas."""
