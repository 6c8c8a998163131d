"""The command line: one function per command, one file per group of commands."""

from __future__ import annotations

from pefll.cli.app import main

__all__ = ["main"]
