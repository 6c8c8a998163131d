"""Real clients on other machines: a folder per federation, certificates and keys, and Flower's processes."""
