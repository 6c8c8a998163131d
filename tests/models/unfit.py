"""A module that fails while it is imported."""

f = 1 / 0
