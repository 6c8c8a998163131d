"""Keep what a campaign of faults came to, beside the other campaigns, in one file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pefll.core.files import write_json
from pefll.training.summary import commit

FILE = Path("results/faults.json")


def record(out: Path, name: str, command: str, figures: dict[str, Any]) -> None:
    """Write one campaign's figures into the file of all; the other campaigns' stay as they are.

    Args:
        out: the file.
        name: of the campaign; its figures of before are replaced.
        command: makes the figures again.
        figures: counts, at least `tried`, `accepted_silently` and `tracebacks`.
    """
    content = json.loads(out.read_text()) if out.exists() else {}
    made = {"command": command, "commit": commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds")}
    content.setdefault("campaigns", {})[name] = figures | made
    write_json(out, content)
