"""How many settings were tried for each method of Table 1: a comparison is fair only if this is known."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pefll.core.files import read_json
from pefll.experiments.table1 import Cell
from pefll.experiments.trials import HOLDING_OUT, file_name
from pefll.report.runs import MISSING


class Searched(NamedTuple):
    """The searches for one method in one federation.

    Attributes:
        settings: number of different settings.
        runs: number of training runs; more than settings if some were tried with several seeds.
    """

    settings: int
    runs: int

    def __str__(self) -> str:
        """The number of settings, with the number of runs if it is another one."""
        return str(self.settings) if self.runs == self.settings else f"{self.settings} ({self.runs} runs)"


def searches(method: str, cell: Cell, tuned: Path) -> Searched:
    """Return what was tried for a method in a cell, with and without held-out clients.

    Args:
        method: its name.
        cell: the federation.
        tuned: folder of trial files.
    """
    stem = re.escape(file_name(cell.data, method, cell.clients))
    named = re.compile(rf"{stem}({HOLDING_OUT}.+)?")
    paths = [path for path in tuned.glob("*.json") if named.fullmatch(path.stem)]
    rows = [row for path in paths for row in read_json(path).get("trials", [])]
    return Searched(len({json.dumps(row["settings"], sort_keys=True) for row in rows}), len(rows))


def searched_lines(methods: Mapping[str, str], cells: Sequence[Cell], tuned: Path) -> list[str]:
    """Return a table in Markdown with the number of settings that were tried.

    Args:
        methods: method -> title.
        cells: the columns.
        tuned: folder of trial files.
    """
    body = []
    for method, title in methods.items():
        found = [searches(method, cell, tuned) for cell in cells]
        body.append([title, *(str(one) if one.runs else MISSING for one in found)])
    headings = ["", *(cell.title for cell in cells)]
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *body)]
