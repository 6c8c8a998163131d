"""How many connections may be open at once, and how long one may take to become one that is heard.

A connection costs a stranger nothing, also one without a word of TLS on it. Each takes a file descriptor of the server,
of which the operator's port, the database and the server's app need some, too.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import weakref
from typing import Any

HANDSHAKE_SECONDS = 20.0
# For all but clients' connections.
KEPT_DESCRIPTORS = 256


def raise_descriptor_limit() -> int:
    """Let the process have as many files and connections open as the system allows it; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # a system may allow less than it says
        return soft
    return hard


class Door(socket.socket):
    """A socket that listens, and closes at once what comes while too many of its connections are open.

    Args:
        listener: is taken over.
        most: how many connections may be open.
    """

    def __init__(self, listener: socket.socket, most: int) -> None:
        super().__init__(fileno=listener.detach())
        self._most = most
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; ConnectionAbortedError where there are too many, which event loops expect."""
        connection, address = super().accept()
        self._accepted.add(connection)
        if len(self._accepted) > self._most:
            self._accepted = weakref.WeakSet(one for one in self._accepted if one.fileno() >= 0)
        if len(self._accepted) > self._most:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        return connection, address


class ImpatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers close connections that are not ready with TLS after some seconds.

    It is Python's own and not uvloop's, which would not ask a `Door` for its connections.
    """

    async def create_server(self, *words: Any, **named: Any) -> Any:
        """Do as the event loop does; uvicorn has no setting for this."""
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*words, **named)
