"""The server's ports, with two limits on connections: their number, and the time that each may send no request.

A stranger can open connections at no cost, even without TLS. Each takes a file descriptor of the server. The operator's
port, the database and the server's app need descriptors, too. uvicorn closes a connection that is idle between two
requests. It does not close a connection that never sends its first request, or that sends a request byte by byte.
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
    except (OSError, ValueError):  # some systems refuse the limit that they state
        return soft
    return hard


def check_port(host: str, port: int, folder: Path) -> None:
    """Raise PefllError if the server cannot listen at an address; see `bind`."""
    bind(host, port, folder).close()


def bind(host: str, port: int, folder: Path) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet; PefllError if the address cannot be used.

    Args:
        host: name or address of this machine.
        port: port number; 0 for any free port.
        folder: folder of the federation, named in the error.
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
            f"port {port} is in use at {host}:{port}, by another program or by a server that still runs; end it, or "
            f"give the federation another port: {other}",
            code="PEFLL-F101",
        )
    if error.errno == errno.EACCES:
        reason = f"you have no right to use port {port}; choose one from 1024 on"
    else:
        reason = f"{host} is no address of this machine; --host 0.0.0.0 listens at all its addresses"
    return PefllError(f"the server cannot listen at {host}:{port}: {reason}", code="PEFLL-F104")


class LimitedListener(socket.socket):
    """Replaces the listening socket `listener`, and closes new connections while `most` are open."""

    def __init__(self, listener: socket.socket, most: int) -> None:
        super().__init__(fileno=listener.detach())
        self._most = most
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; if too many are open, raise ConnectionAbortedError, which event loops expect."""
        connection, address = super().accept()
        self._accepted.add(connection)
        if len(self._accepted) > self._most:
            self._accepted = weakref.WeakSet(one for one in self._accepted if one.fileno() >= 0)
        if len(self._accepted) > self._most:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        return connection, address


class HandshakeTimeoutLoop(asyncio.SelectorEventLoop):
    """An event loop that closes a connection if its TLS handshake takes longer than `HANDSHAKE_SECONDS`.

    It extends Python's loop, because uvloop would not call `LimitedListener.accept`.
    """

    async def create_server(self, *words: Any, **named: Any) -> Any:
        """Create a server with this timeout, for which uvicorn has no setting."""
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*words, **named)


class HeadTimeoutProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection if the head of a request takes longer than `HEAD_SECONDS`."""

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
