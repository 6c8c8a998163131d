"""The record of a machine: a JSON file with the measured races and their code. A later call adds missing races."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.contender import INSTALL
from benchmarks.speed.plan import Race
from benchmarks.speed.race import ROOT, Row
from pefll.core.errors import PefllError
from pefll.core.files import read_json, write_json
from pefll.engines.hardware import cores, processor
from pefll.training.summary import commit

PEERS = ("pfl", "flwr", "ray")


def machine() -> dict[str, Any]:
    """Return the facts of this machine that affect the figures."""
    return {
        "cpu": processor(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def file_name(facts: dict[str, Any]) -> str:
    """Return a name for a machine's record: its GPU, or its processor and cores."""
    name = facts["gpu"] or f"{facts['cpu']} {facts['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def code() -> str:
    """Return a hash of the measured code and of the benchmark's code.

    Unlike the commit, it differs between two uncommitted states, and does not change with the documentation.
    """
    digest = hashlib.sha256()
    for folder in (ROOT / "src" / "pefll", ROOT / "benchmarks" / "speed"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Record:
    """The rows of one machine.

    Args:
        path: path of the JSON file.
        fresh: whether to ignore existing races.
        facts: facts about the machine; by default those of this machine.
        source: hash of the code; by default that of the current code.
    """

    def __init__(
        self, path: Path, fresh: bool = False, facts: dict[str, Any] | None = None, source: str | None = None
    ) -> None:
        self.path = path
        self.facts = machine() if facts is None else facts
        self.code = code() if source is None else source
        found = {} if fresh or not path.exists() else read_json(path)
        if not isinstance(found, dict) or not isinstance(found.get("races", []), list):
            raise PefllError(f"{path} is not a record of this benchmark; move it away or use --out")
        same_machine = found.get("machine") == self.facts
        self.races: list[dict[str, Any]] = found.get("races", []) if same_machine else []

    def has(self, race: Race, turns: int, turn_seconds: float) -> bool:
        """Return whether one run has measured every contender of a race with the current code and settings.

        Software that was not installed and still is not counts as measured.
        """
        key = self._key(race, turns, turn_seconds)
        for entry in self.races:
            if {name: entry[name] for name in key} != key:
                continue
            rows = {row["contender"]: row for row in entry["rows"]}
            if all(_settled(rows.get(one.name), one.missing) for one in race.contenders):
                return True
        return False

    def add(self, race: Race, turns: int, turn_seconds: float, rows: Sequence[Row]) -> None:
        """Add a race, which replaces an older one with the same setting, and write the file."""
        setting = race.setting.plain()
        names = {one.name for one in race.contenders}
        kept = []
        for entry in self.races:
            same = entry["group"] == race.group and entry["setting"] == setting
            # A race with fewer contenders does not replace one with more; both can be shown.
            if not (same and {row["contender"] for row in entry["rows"]} <= names):
                kept.append(entry)
        about = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "peers": versions()}
        self.races = [*kept, self._key(race, turns, turn_seconds) | about | {"rows": list(rows)}]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"benchmark": "speed", "machine": self.facts, "races": self.races})

    def _key(self, race: Race, turns: int, turn_seconds: float) -> dict[str, Any]:
        return {
            "group": race.group,
            "setting": race.setting.plain(),
            "code": self.code,
            "turns": turns,
            "turn_seconds": turn_seconds,
        }


def _settled(row: Row | None, missing: bool) -> bool:
    if row is None:
        return False
    return "error" not in row or (row["error"] == INSTALL and missing)


def versions() -> dict[str, str]:
    """Return the versions of the other simulators that are installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the records in a folder as (name, content); records with a GPU come first."""
    found = [(path.stem, read_json(path)) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda record: record[1]["machine"]["gpu"] is None)
