"""The server's ports, and limits on connections: how many are open, and how long each may send no request.

A connection costs a stranger nothing, even without TLS. Each one takes a file descriptor of the server. The operator's
port, the database and the server's app need descriptors, too. uvicorn closes a connection that is idle between two
requests. It does not close one that never sends its first request, or sends the next one a byte at a time.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import weakref
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pefll.core.errors import PefllError

HANDSHAKE_SECONDS = 20.0
HEAD_SECONDS = 20.0
RESERVED_DESCRIPTORS = 256  # for everything except clients' connections


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files and connections as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a system may allow less than its stated limit
        return soft
    return hard


def check_port(host: str, port: int, folder: Path) -> None:
    """Raise PefllError if the server cannot listen at an address; see `bind`."""
    bind(host, port, folder).close()


def bind(host: str, port: int, folder: Path) -> socket.socket:
    """Return a socket bound to an address, not listening yet; PefllError, with what to do, if that fails.

    Args:
        host: name or address.
        port: 0 for any free one.
        folder: of the federation, for the error.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, place = found[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise _cannot_listen(host, port, folder, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, folder, error) from None
    return bound


def _cannot_listen(host: str, port: int, folder: Path, error: OSError) -> PefllError:
    if error.errno == errno.EADDRINUSE:
        other = f"`pefll flower renew {folder} --address HOST:PORT`"
        return PefllError(
            f"port {port} is in use at {host}:{port}, by another program or by a server that still runs: end that one, "
            f"or give the federation another port: {other}",
            code="PEFLL-F101",
        )
    if error.errno == errno.EACCES:
        reason = f"you have no right to use port {port}; choose one from 1024 on"
    else:
        reason = f"{host} is no address of this machine; --host 0.0.0.0 listens at all its addresses"
    return PefllError(f"the server cannot listen at {host}:{port}: {reason}", code="PEFLL-F104")


class LimitedListener(socket.socket):
    """A listening socket, taken over from `listener`, that closes new connections while `most` are open."""

    def __init__(self, listener: socket.socket, most: int) -> None:
        super().__init__(fileno=listener.detach())
        self._most = most
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; ConnectionAbortedError, which event loops expect, if too many are open."""
        connection, address = super().accept()
        self._accepted.add(connection)
        if len(self._accepted) > self._most:
            self._accepted = weakref.WeakSet(one for one in self._accepted if one.fileno() >= 0)
        if len(self._accepted) > self._most:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        return connection, address


class HandshakeTimeoutLoop(asyncio.SelectorEventLoop):
    """An event loop that closes connections without a complete TLS handshake after `HANDSHAKE_SECONDS`.

    It extends Python's loop. uvloop would not call `LimitedListener.accept`.
    """

    async def create_server(self, *words: Any, **named: Any) -> Any:
        """Create a server with the timeout; uvicorn has no setting for it."""
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*words, **named)


class HeadTimeoutProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection that has not sent a complete request head after `HEAD_SECONDS`."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Stop the timer after a complete head; start it when a new head begins."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def on_response_complete(self) -> None:
        """Stop the timer; uvicorn itself closes idle connections."""
        self._stop_timer()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
