"""How much memory this process can still get."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Linux files about memory; tests replace them.
MEMINFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def total_memory() -> int | None:
    """Return the bytes of memory of the machine; None if unknown."""
    if found := _meminfo("MemTotal"):
        return found
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def available_memory() -> int | None:
    """Return the bytes that this process can still get, within the limits of its container; None if unknown.

    The file cache counts as available. Systems such as macOS report only their total, so it is returned there.
    """
    known = [_meminfo("MemAvailable") or total_memory(), *_left_in_cgroups()]
    return min((each for each in known if each is not None), default=None)


def _meminfo(key: str) -> int | None:
    """Return the bytes in the row `key` of /proc/meminfo; None if there is no such row."""
    rows = _rows(MEMINFO) if sys.platform.startswith("linux") else []
    return next((1024 * int(row[1]) for row in rows if row[0] == f"{key}:" and row[1:] and row[1].isdecimal()), None)


def _left_in_cgroups() -> list[int]:
    """Return the bytes left in each cgroup of this process and in the parents of these cgroups."""
    left = []
    for folder, limit, used in _cgroups():
        most, now = _number_in(folder / limit), _number_in(folder / used)
        # Version 1 writes a huge number for "no limit".
        if most is not None and now is not None and most < 1 << 60:
            files = _statistic(folder / "memory.stat", ("inactive_file", "total_inactive_file"))
            left.append(max(0, most - now + files))
    return left


def _cgroups() -> list[tuple[Path, str, str]]:
    """Return the cgroup folders that may limit this process, each with the names of its limit and usage files."""
    try:
        rows = OWN_CGROUP.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for row in rows:
        _, kinds, place = [*row.split(":", 2), "", ""][:3]
        second = kinds == ""
        if not second and "memory" not in kinds.split(","):
            continue
        top = CGROUPS if second else CGROUPS / "memory"
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        # In a container, the cgroup of this process may be mounted as the top one.
        folder = top / place.lstrip("/")
        folders = {top, *(each for each in (folder, *folder.parents) if each.is_relative_to(top))}
        found += [(each, *names) for each in sorted(folders)]
    return found


def _rows(path: Path) -> list[list[str]]:
    """Return the words of each row of a file; an empty list if the file cannot be read."""
    try:
        return [row.split() for row in path.read_text(encoding="utf-8", errors="replace").splitlines() if row.strip()]
    except OSError:
        return []


def _number_in(path: Path) -> int | None:
    rows = _rows(path)
    return int(rows[0][0]) if rows and rows[0][0].isdecimal() else None


def _statistic(path: Path, names: tuple[str, ...]) -> int:
    """Return the largest value, in bytes, among the rows `names` of a memory.stat file; 0 if it has none of them."""
    rows = [row for row in _rows(path) if len(row) == 2 and row[0] in names and row[1].isdecimal()]
    return max((int(value) for _, value in rows), default=0)
