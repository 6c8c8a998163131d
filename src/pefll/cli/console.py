"""Where commands print: results to the standard output, notes and progress to the standard error."""

from __future__ import annotations

from rich.console import Console

INTERRUPTED = 130  # the exit code after Ctrl-C; typer uses it too

out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
