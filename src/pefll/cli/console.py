"""Where verbs write: answers to the standard output, everything else beside it."""

from __future__ import annotations

from rich.console import Console

INTERRUPTED = 130  # the exit code after Ctrl-C; also what typer makes of one that no verb has answered

out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
