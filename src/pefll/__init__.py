"""Personalized federated learning by learning to learn."""

__version__ = "0.1.0"
