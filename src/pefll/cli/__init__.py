"""The command line: thin verbs over the package."""

from __future__ import annotations

from pefll.cli.app import main

__all__ = ["main"]
