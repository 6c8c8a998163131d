"""Shows and keeps the output of Flower's processes, and finds the error in it if a process ends."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pefll.core.errors import PefllError
from pefll.deploy.private import PRIVATE_UMASK, write_private

KEPT_LINES = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^(\S+Z )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b *(\[[\w.]+\])? *:? *")
# The last line of output of this package's own processes after a failure; see `superlink.main`.
_OWN_ERROR = re.compile(r"^error: (?P<sentence>.+) \[(?P<code>PEFLL-\w+)\]\Z", re.MULTILINE)
_BAD = re.compile(r"\b(ERROR|CRITICAL)\b|Errno|^[\w.]+(Error|Exception)\b")


def exit_error(process: str, output: str, log: Path) -> PefllError:
    """Return the error for a process that has ended: its own if it printed a PefllError, else one about its output.

    Args:
        process: name of the process, for the error.
        output: output of the process, or its last lines.
        log: file with the output, named in the error.
    """
    own = _OWN_ERROR.search(output.rstrip())
    if own:
        return PefllError(own["sentence"], code=own["code"])
    return PefllError(
        f"{process} ended by itself; its last error is {error_line(output)!r}; see {log} for all of its output",
        code="PEFLL-F102",
    )


def error_line(output: str) -> str:
    """Return the last error in a process's output, without colours and log level."""
    lines = [line for line in (_COLOUR.sub("", line).rstrip() for line in output.splitlines()) if line.strip()]
    if not lines:
        return "nothing"
    bad = [place for place, line in enumerate(lines) if _BAD.search(line)]
    first = bad[-1] if bad else len(lines) - 1
    words = [_LEVEL.sub("", lines[first])]
    for line in lines[first + 1 :]:
        if _LEVEL.match(line) or line.startswith("For more information"):
            break
        words.append(line)
    return " ".join(" ".join(words).split())[:300]


class ShownProcess(subprocess.Popen[bytes]):
    """A process in its own process group; its output is shown, and `last_output` writes the last lines to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=PRIVATE_UMASK,
        )
        self.log = log
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def check(self, name: str) -> None:
        """Raise PefllError if the process has ended; see `exit_error`."""
        if self.poll() is not None:
            raise exit_error(name, self.last_output(), self.log)

    def last_output(self) -> str:
        """Return the last lines of a process that has ended, and write them to its log."""
        self._reader.join(2)  # does not wait for its child processes, which may keep the pipe open for longer
        last = b"".join(list(self._last))
        with suppress(PefllError):
            write_private(self.log, last)
        return last.decode(errors="replace")

    def _show(self) -> None:
        assert self.stdout is not None
        for line in self.stdout:
            self._last.append(line)
            with suppress(OSError):  # the terminal may be gone
                os.write(2, line)
