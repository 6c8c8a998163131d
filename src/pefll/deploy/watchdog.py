"""A watchdog process: it ends what this process started, as soon as this process is gone, however it went.

A process that gets SIGKILL cannot clean up, and Flower's programs do not notice that the one that started them is gone;
some of them also start others in sessions of their own. So every process gets a mark in its environment, which all that
it starts inherit. The watchdog holds one end of a pipe and does nothing until the other end is closed; then it ends
all processes with the mark.

It runs this file alone, without the package, so that it starts at once and has no more than a bare Python.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "PEFLL_STARTED_BY"
END_SECONDS = 3.0  # from SIGTERM to SIGKILL
_lock = threading.Lock()
_watchdog: tuple[int, str, subprocess.Popen[bytes]] | None = None  # the process it watches, the mark, the watchdog


def mark() -> dict[str, str]:
    """Return what to add to the environment of a process that must not outlive this one.

    The first call starts the watchdog.
    """
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog[0] != os.getpid() or _watchdog[2].poll() is not None:
            value = uuid.uuid4().hex
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, value],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # whoever reads this process's output must see its end
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                env={name: text for name, text in os.environ.items() if name != MARK},
            )
            _watchdog = os.getpid(), value, process
            atexit.register(_end_watchdog, process)
        return {MARK: _watchdog[1]}


def _end_watchdog(process: subprocess.Popen[bytes]) -> None:
    """Let the watchdog end what is left, and wait for it."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(3 * END_SECONDS)


def marked(value: str) -> list[int]:
    """Return the processes with a mark, other than this one; those that have ended already have none."""
    word = f"{MARK}={value}"
    places = Path("/proc")
    if not (places / "self" / "environ").exists():
        return _listed(word)
    found = []
    for place in places.iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            with suppress(OSError):  # gone meanwhile, or somebody else's
                if word.encode() in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
    return found


def _listed(word: str) -> list[int]:
    """Do as `marked` on systems without /proc, such as macOS, whose `ps -E` shows environments."""
    lines = subprocess.run(["ps", "-AEww", "-o", "pid=,command="], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if word in line.split() and int(line.split()[0]) != os.getpid()]


def end_marked(value: str, seconds: float = END_SECONDS) -> None:
    """End all processes with a mark; kill those that do not end within some seconds."""
    began, asked = time.monotonic(), set()
    while (left := marked(value)) and time.monotonic() - began < 3 * seconds:
        kills = time.monotonic() - began > seconds
        for pid in left:
            if kills or pid not in asked:
                asked.add(pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if kills else signal.SIGTERM)
        time.sleep(0.05)


def _watch(value: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process that it watches, and not before
    sys.stdin.buffer.read()
    end_marked(value)


if __name__ == "__main__":
    _watch(sys.argv[1])
