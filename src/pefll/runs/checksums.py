"""What the files of a run carry, so that damage and files of other runs are noticed.

Every run has a number of its own. It stands with a SHA-256 in the first line of config.toml, and goes into the check of
every line of history.jsonl, of summary.json and of each checkpoint's manifest. These checks find accidents. Whoever
wants to deceive can compute them too.
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

CHECK = "check"  # the key that is added to a row and to a summary
_FIRST_LINE = re.compile(r"# pefll run ([0-9a-f]{16}), sha256 of the lines below: ([0-9a-f]{64})")


def new_run() -> str:
    """Return a number for a run that no other run has."""
    return secrets.token_hex(8)


def digest(content: Any) -> str:
    """Return the SHA-256 of what JSON can hold, however it is laid out in a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_first_line(text: str, run: str) -> str:
    """Return settings as TOML with a comment in front that names the run and checks the rest."""
    return f"# pefll run {run}, sha256 of the lines below: {_of_text(text, run)}\n{text}"


def read_first_line(text: str) -> tuple[str, bool | None]:
    """Return the run that settings name and whether their check is right; "" and None where they carry none."""
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
    """The lines of history.jsonl, as far as they are whole.

    Attributes:
        rows: one per evaluation, oldest first, without their checks.
        checks: of each row; empty texts for rows of an earlier version.
        lines: as they stand in the file, with their ends.
        damage: what is wrong with the line after them, in words; empty where nothing is.
    """

    rows: list[dict[str, Any]]
    checks: list[str]
    lines: list[bytes]
    damage: str = ""


def checked_line(row: Mapping[str, Any], before: str, run: str) -> bytes:
    """Return a row as a line of JSON, with a check of it and of all rows before it.

    Args:
        row: one evaluation.
        before: the check of the row before it; empty for the first.
        run: the run's number; empty for a line without a check.
    """
    content = dict(row)
    if run:
        content[CHECK] = _of_row(row, before, run)
    return json.dumps(content).encode() + b"\n"


def read_rows(content: bytes, run: str) -> Rows:
    """Read the lines of a history until its end, or the first one that is damaged.

    A last line without an end was cut off when its writer was killed: it is left out, and is no damage.

    Args:
        content: of the file.
        run: the run's number; empty for a run of an earlier version, whose rows carry no checks.
    """
    found = Rows([], [], [])
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        before = found.checks[-1] if found.checks else ""
        try:
            row, check = _read_row(line, before, run)
        except ValueError as error:
            return found._replace(damage=f"line {number} {error}")
        found.rows.append(row)
        found.checks.append(check)
        found.lines.append(line + b"\n")
    if not rest:
        return found
    try:
        row, check = _read_row(rest, found.checks[-1] if found.checks else "", run)  # only its end may be missing
    except ValueError as error:
        cut_off = rest.isascii() and rest.startswith(b"{") and rest.count(b"{") > rest.count(b"}")
        return found if cut_off else found._replace(damage=f"line {len(lines) + 1} {error}")
    return Rows([*found.rows, row], [*found.checks, check], [*found.lines, rest + b"\n"])


def last_check(path: Path) -> str:
    """Return the check of the last line of a history, without a look at the others; empty where there is none."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        end, size, lines = file.seek(0, os.SEEK_END), 1 << 12, list[bytes]()
        while len(lines) < 2:  # the last one is whole where there is one before it
            file.seek(max(0, end - size))
            lines = file.read().splitlines()
            if size >= end:
                break
            size *= 8
        row = parse_json(lines[-1]) if lines else None
        return str(row.get(CHECK, "")) if isinstance(row, dict) else ""
    return ""


def _read_row(line: bytes, before: str, run: str) -> tuple[dict[str, Any], str]:
    """Return a row and its check; ValueError with the end of a sentence where it is damaged."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"is not JSON in UTF-8 ({error})") from error
    number = row.get("round") if isinstance(row, dict) else None
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e15:  # nor NaN
        raise ValueError("is not an evaluation")
    check = row.pop(CHECK, "")
    if run and check != _of_row(row, before, run):
        raise ValueError("is not what was written: its check is wrong")
    return row, check if isinstance(check, str) else ""


def _of_row(row: Mapping[str, Any], before: str, run: str) -> str:
    return digest([run, before, row])[:16]
