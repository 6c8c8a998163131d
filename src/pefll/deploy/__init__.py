"""Federations of real clients on other machines: their folders, certificates, keys and Flower processes."""
