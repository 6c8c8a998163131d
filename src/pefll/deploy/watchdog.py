"""A watchdog process: when this process is gone, it ends every process that this process started.

A process cannot clean up after SIGKILL. Flower's programs do not notice the end of their parent, and some of them start
others in new sessions. So every started process has a tag in its environment, and its children inherit the tag. The
watchdog reads from a pipe until this process closes the other end. Then it ends all processes with the tag.

The watchdog runs only this file, without the rest of the package. So it starts at once and takes little memory.
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

TAG = "PEFLL_STARTED_BY"
END_SECONDS = 3.0  # time from SIGTERM to SIGKILL
_lock = threading.Lock()
_watchdog: tuple[int, str, subprocess.Popen[bytes]] | None = None  # watched process, value of the tag, watchdog


def watchdog_environment() -> dict[str, str]:
    """Return an environment variable for a new process that must not outlive this process.

    The first call starts the watchdog.
    """
    global _watchdog
    with _lock:
        if _watchdog is None or _watchdog[0] != os.getpid() or _watchdog[2].poll() is not None:
            value = uuid.uuid4().hex
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, value],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else a reader of this process's output would wait for the watchdog's end
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not reach the watchdog
                env={name: text for name, text in os.environ.items() if name != TAG},
            )
            _watchdog = os.getpid(), value, process
            atexit.register(_end_watchdog, process)
        return {TAG: _watchdog[1]}


def _end_watchdog(process: subprocess.Popen[bytes]) -> None:
    """Make the watchdog end the remaining processes, and wait until it has ended."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(3 * END_SECONDS)


def tagged_processes(value: str) -> list[int]:
    """Return the numbers of the running processes whose tag has this value, except this process."""
    word = f"{TAG}={value}"
    places = Path("/proc")
    if not (places / "self" / "environ").exists():
        return _tagged_by_ps(word)
    found = []
    for place in places.iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            with suppress(OSError):  # the process has ended, or belongs to another user
                if word.encode() in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
    return found


def _tagged_by_ps(word: str) -> list[int]:
    """Return the same on systems without /proc, such as macOS, where `ps -E` shows environments."""
    lines = subprocess.run(
        ["ps", "-AEww", "-o", "pid=,command="], capture_output=True, text=True, errors="replace"
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if word in line.split() and int(line.split()[0]) != os.getpid()]


def end_tagged(value: str, seconds: float = END_SECONDS) -> None:
    """End all processes whose tag has this value; kill those that still run after `seconds`."""
    began, asked = time.monotonic(), set()
    while (left := tagged_processes(value)) and time.monotonic() - began < 3 * seconds:
        kills = time.monotonic() - began > seconds
        for pid in left:
            if kills or pid not in asked:
                asked.add(pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if kills else signal.SIGTERM)
        time.sleep(0.05)


def _watch(value: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the watched process ends the watchdog
    sys.stdin.buffer.read()
    end_tagged(value)


if __name__ == "__main__":
    _watch(sys.argv[1])
