"""Where verbs write: answers to the standard output, everything else beside it."""

from __future__ import annotations

from rich.console import Console

out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
