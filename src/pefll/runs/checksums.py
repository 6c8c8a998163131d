"""Checks: hashes in a run's files, which find damage and files of other runs.

Every run has a random ID. The first line of config.toml has this ID and a SHA-256. There are further hashes in each
line of history.jsonl, in summary.json and in each checkpoint's manifest. They depend on the ID too. Checks find
accidents. They do not stop an attacker, who can compute them too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.files import parse_json

CHECK = "check"  # key of the check in a row and in a summary
MOST_LINE = 1 << 20  # most bytes of a row; usual rows have a few hundred
_FIRST_LINE = re.compile(r"# pefll run ([0-9a-f]{16}), sha256 of the lines below: ([0-9a-f]{64})")


def new_run() -> str:
    """Return a random ID for a new run."""
    return secrets.token_hex(8)


def digest(content: Any) -> str:
    """Return the SHA-256 of a JSON value; it does not depend on the layout of a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_first_line(text: str, run: str) -> str:
    """Return settings as TOML below a comment with the run's ID and a check of the settings."""
    return f"# pefll run {run}, sha256 of the lines below: {_of_text(text, run)}\n{text}"


def read_first_line(text: str) -> tuple[str, bool | None]:
    """Return (the run's ID, True); ("", None) for a text without a check, ("", False) for a wrong check."""
    first, _, rest = text.partition("\n")
    if not first.startswith("# pefll run "):
        return "", None
    found = _FIRST_LINE.fullmatch(first)
    if found is None or found[2] != _of_text(rest, found[1]):
        return "", False
    return found[1], True


def _of_text(text: str, run: str) -> str:
    return hashlib.sha256(f"{run}\n{text}".encode()).hexdigest()


class Rows(NamedTuple):
    """The lines of history.jsonl before the first damaged one.

    Attributes:
        rows: one per evaluation, oldest first, without their checks.
        checks: the check of each row; empty for rows that an earlier version wrote.
        lines: the same rows as lines of the file, with line ends.
        damage: what is wrong with the next line; empty if there is no damage.
    """

    rows: list[dict[str, Any]]
    checks: list[str]
    lines: list[bytes]
    damage: str = ""

    @property
    def last_check(self) -> str:
        """The check of the last row; empty without rows."""
        return self.checks[-1] if self.checks else ""


def checked_line(row: Mapping[str, Any], before: str, run: str) -> bytes:
    """Return a row as a line of JSON, with a check of this row and all earlier rows.

    `before` is the previous row's check; empty for the first row. Without a run's ID the line has no check.
    """
    content = dict(row)
    if run:
        content[CHECK] = _of_row(row, before, run)
    return json.dumps(content).encode() + b"\n"


def read_rows(content: bytes, run: str) -> Rows:
    """Return the rows of a history up to its end, or up to the first damaged line.

    A killed writer leaves an incomplete last line. That line is left out, and does not count as damage. Runs of earlier
    versions have no ID, and their rows have no checks.
    """
    found, start = Rows([], [], []), 0
    while start < len(content):  # not all at once: a damaged file may have a billion lines
        number, end = len(found.rows) + 1, content.find(b"\n", start, start + MOST_LINE)
        is_last = end < 0
        if is_last and len(content) - start > MOST_LINE:
            return found._replace(damage=f"line {number} has more than {MOST_LINE:,} bytes")
        line = content[start:] if is_last else content[start:end]
        try:
            row, check = _read_row(line, found.last_check, run)
        except ValueError as error:
            cut_off = is_last and line.isascii() and line.startswith(b"{") and line.count(b"{") > line.count(b"}")
            return found if cut_off else found._replace(damage=f"line {number} {error}")
        start += len(line) + 1
        found.rows.append(row)
        found.checks.append(check)
        found.lines.append(line + b"\n")
    return found


def last_check(path: Path) -> str:
    """Return the check of the last line of a history without reading the whole file; empty if there is none."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        end, size, lines = file.seek(0, os.SEEK_END), 1 << 12, list[bytes]()
        while len(lines) < 2:  # if there are two lines, the last one is complete
            file.seek(max(0, end - size))
            lines = file.read().splitlines()
            if size >= max(end, MOST_LINE):
                break
            size *= 8
        row = parse_json(lines[-1]) if lines else None
        return str(row.get(CHECK, "")) if isinstance(row, dict) else ""
    return ""


def _read_row(line: bytes, before: str, run: str) -> tuple[dict[str, Any], str]:
    """Return a row and its check; ValueError if it is damaged, worded as the end of a sentence."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"is not JSON in UTF-8 ({error})") from error
    number = row.get("round") if isinstance(row, dict) else None
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e15:  # not NaN either
        raise ValueError("is not an evaluation")
    check = row.pop(CHECK, "")
    if run and check != _of_row(row, before, run):
        raise ValueError("is not what was written: its check is wrong")
    return row, check if isinstance(check, str) else ""


def _of_row(row: Mapping[str, Any], before: str, run: str) -> str:
    return digest([run, before, row])[:16]
