"""Repeated attacks from outside: each module is a command that damages something many times and counts what happens."""
