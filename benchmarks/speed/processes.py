"""Processor time and memory of a process and its descendants, from Linux's /proc; on other systems of itself only."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

PROC = Path("/proc")
HAS_PROC = (PROC / "self" / "stat").exists()
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces; None if the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def tree(pid: int) -> list[int]:
    """Return a process and all its running descendants."""
    if not HAS_PROC:
        return [pid]
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of all processes it started, also of those that have ended."""
    if not HAS_PROC:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + ended.ru_utime + ended.ru_stime
    # Fields 14 to 17 are user and system time of the process, and of its children that have ended.
    return sum(sum(map(int, fields[11:15])) for each in tree(pid) if (fields := _stat(each))) / _TICK


def memory_bytes(pid: int) -> int:
    """Return the current memory of a process and its descendants, with shared pages counted once; 0 if unknown."""
    total = 0
    for each in tree(pid) if HAS_PROC else ():
        try:
            lines = (PROC / str(each) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def own_peak_bytes() -> int:
    """Return the peak memory of this process, without its descendants."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
