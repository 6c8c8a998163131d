"""Engines: they run a method's rounds on the clients of a federation."""
