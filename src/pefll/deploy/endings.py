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

from pefll.core.errors import PefllError
from pefll.deploy.private import PRIVATE_UMASK, write_private

KEPT_LINES = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^(\S+Z )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b *(\[[\w.]+\])? *:? *")
# What `main` of a process of ours ends with.
_OWN_ERROR = re.compile(r"^error: (?P<sentence>.+) \[(?P<code>PEFLL-\w+)\]\Z", re.MULTILINE)
_BAD = re.compile(r"\b(ERROR|CRITICAL)\b|Errno|^[\w.]+(Error|Exception)\b")


def check_port(host: str, port: int, folder: Path) -> None:
    """Raise PefllError where the server cannot listen at an address of this machine; see `bind`."""
    bind(host, port, folder).close()


def bind(host: str, port: int, folder: Path) -> socket.socket:
    """Take a port without listening at it yet; PefllError where that cannot be, with what to do.

    Args:
        host: where the server listens.
        port: at which port; 0 for any that is free.
        folder: of the federation.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, place = found[0]
        taken = socket.socket(family, kind)
    except OSError as error:
        raise _cannot_listen(host, port, folder, error) from None
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(place)
    except OSError as error:
        taken.close()
        raise _cannot_listen(host, port, folder, error) from None
    return taken


def _cannot_listen(host: str, port: int, folder: Path, error: OSError) -> PefllError:
    if error.errno == errno.EADDRINUSE:
        other = f"`pefll flower renew {folder} --address HOST:PORT`"
        return PefllError(
            f"port {port} is in use at {host}:{port}, by another program or by a server that was started before: end "
            f"that one, or give the federation another port: {other}",
            code="PEFLL-F101",
        )
    if error.errno == errno.EACCES:
        reason = f"port {port} needs rights that you do not have; choose one from 1024 on"
    else:
        reason = f"{host} is no address of this machine; with --host 0.0.0.0 the server listens at all that it has"
    return PefllError(f"the server cannot listen at {host}:{port}: {reason}", code="PEFLL-F104")


def ended_by_itself(what: str, said: str, log: Path) -> PefllError:
    """Return the error for a process that should have gone on; one of ours that ended with an error has said it.

    Args:
        what: the process, as the subject of a sentence.
        said: all that it said, or the end of it.
        log: where that can be read.
    """
    own = _OWN_ERROR.search(said.rstrip())
    if own:
        return PefllError(own["sentence"], code=own["code"])
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
            umask=PRIVATE_UMASK,
        )
        self.log = log
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def check(self, what: str) -> None:
        """Raise PefllError where it has ended; see `ended_by_itself`."""
        if self.poll() is not None:
            raise ended_by_itself(what, self.said(), self.log)

    def said(self) -> str:
        """Return the last lines of a process that has ended, and write them to its log."""
        self._reader.join(2)  # something that it has started may hold the pipe for longer
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
