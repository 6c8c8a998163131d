"""Experiments of the paper: one small file each, which says what to run and how to show the results."""
