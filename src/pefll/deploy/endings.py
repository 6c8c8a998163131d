"""Why a process of Flower's ended by itself or cannot start, in one sentence."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pefll.deploy.certificates import write_secret
from pefll.errors import PefllError

IN_USE = "address already in use"
KEPT_LINES = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^(\S+Z )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b *(\[[\w.]+\])? *:? *")
_BAD = re.compile(r"\b(ERROR|CRITICAL)\b|Errno|^[\w.]+(Error|Exception)\b")


def check_port(host: str, port: int, advice: str) -> None:
    """Raise PefllError where nobody can listen at an address of this machine, with who may be there already.

    Args:
        host: where to listen.
        port: at which port.
        advice: what to do where it is in use, as the end of a sentence.
    """
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            probe.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise port_in_use(f"{host}:{port}", advice) from None
        if error.errno == errno.EACCES:
            reason = f"port {port} needs rights that you do not have; choose one from 1024 on"
        else:
            reason = f"{host} is no address of this machine; with --host 0.0.0.0 the server listens at all that it has"
        raise PefllError(f"the server cannot listen at {host}:{port}: {reason}", code="PEFLL-F104") from None


def port_in_use(address: str, advice: str) -> PefllError:
    """Return the error for a port where another program listens."""
    port = address.rpartition(":")[2]
    return PefllError(
        f"port {port} is in use at {address}, by another program or by a server that was started before: {advice}",
        code="PEFLL-F101",
    )


def ended_by_itself(what: str, said: str, log: Path, address: str = "", advice: str = "") -> PefllError:
    """Return the error for a process that should have gone on.

    Args:
        what: the process, as the subject of a sentence.
        said: all that it said, or the end of it.
        log: where that can be read.
        address: at which it should have listened; "" for nowhere.
        advice: what to do where the address is in use.
    """
    if address and IN_USE in said.lower():
        return port_in_use(address, advice)
    return PefllError(f"{what} ended by itself and said {last_words(said)!r}; all of it is in {log}", code="PEFLL-F102")


def last_words(said: str) -> str:
    """Return the last line of a log that says what went wrong, with the lines that belong to it."""
    lines = [line for line in (_COLOUR.sub("", line).rstrip() for line in said.splitlines()) if line.strip()]
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


class Shown(subprocess.Popen[bytes]):
    """A process in a group of its own, whose output is shown as it comes and whose last lines are kept.

    Args:
        command: its words.
        environment: of the process.
        log: where the last lines are written if it ends by itself.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.log = log
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def check(self, what: str, address: str = "", advice: str = "") -> None:
        """Raise PefllError where it has ended; see `ended_by_itself`."""
        if self.poll() is not None:
            raise ended_by_itself(what, self.said(), self.log, address, advice)

    def said(self) -> str:
        """Return the last lines of a process that has ended, and write them to its log."""
        self._reader.join(2)  # something that it has started may hold the pipe for longer
        last = b"".join(list(self._last))
        with suppress(PefllError):
            write_secret(self.log, last)
        return last.decode(errors="replace")

    def _show(self) -> None:
        assert self.stdout is not None
        for line in self.stdout:
            self._last.append(line)
            with suppress(OSError):  # the terminal may be gone
                os.write(2, line)
