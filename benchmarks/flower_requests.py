"""Counts the bytes that Flower's clients send and get on the wire, in total and for each type of request.

One proxy counts the encrypted bytes of connections. Another proxy has the server's certificate and key, and decrypts
the connections of all clients. It sees the path of each request, and counts the bytes of HTTP headers and of content,
for requests and answers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_END_OF_HEAD = b"\r\n\r\n"


class Bytes(NamedTuple):
    """Counts of the requests to one path.

    Attributes:
        requests: number of requests.
        heads: bytes of HTTP headers of requests and answers.
        up: bytes of content of the requests.
        down: bytes of content of the answers.
    """

    requests: int = 0
    heads: int = 0
    up: int = 0
    down: int = 0

    def plus(self, other: Bytes) -> Bytes:
        """Return the sum."""
        return Bytes(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: Bytes) -> Bytes:
        """Return the difference."""
        return Bytes(*(mine - its for mine, its in zip(self, other, strict=True)))


Counts = dict[str, Bytes]


def since(before: Counts, after: Counts) -> Counts:
    """Return the counts between two times, the largest first."""
    between = {path: total.minus(before.get(path, Bytes())) for path, total in after.items()}
    return dict(sorted(((p, b) for p, b in between.items() if any(b)), key=lambda item: -sum(item[1])))


class OpeningProxy:
    """A proxy that decrypts HTTPS, forwards it to the server, and counts bytes by path.

    Args:
        port: port of the proxy.
        target: port of the server.
        secrets: folder with ca.crt, server.crt and server.key.
    """

    def __init__(self, port: int, target: int, secrets: Path) -> None:
        self._counts: Counts = {}
        self._target = target
        self._to_clients = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._to_clients.load_cert_chain(secrets / "server.crt", secrets / "server.key")
        self._to_server = ssl.create_default_context(cafile=str(secrets / "ca.crt"))
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(port, ready)), daemon=True).start()
        ready.wait(10)

    def counts(self) -> Counts:
        """Return what was counted so far."""
        return dict(self._counts)

    async def _serve(self, port: int, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", port, ssl=self._to_clients)
        ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target, ssl=self._to_server)
        except OSError:  # the server may end before its clients
            writer.close()
            return
        asked: deque[str] = deque()  # paths of requests without an answer yet

        def request(head: bytes, content: int) -> None:
            asked.append(head.split(b" ", 2)[1].decode())
            self._add(asked[-1], Bytes(1, len(head), up=content))

        def answer(head: bytes, content: int) -> None:
            self._add(asked.popleft(), Bytes(0, len(head), down=content))

        ways = [
            asyncio.create_task(_pass_on(reader, to_server, request)),
            asyncio.create_task(_pass_on(from_server, writer, answer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # if one end closes, the other must, too
        for way in ways:
            way.cancel()
        for end in (writer, to_server):
            with suppress(OSError, ssl.SSLError):
                end.close()

    def _add(self, path: str, more: Bytes) -> None:
        self._counts[path] = self._counts.get(path, Bytes()).plus(more)


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, note: Callable[[bytes, int], None]
) -> None:
    """Forward HTTP messages until the connection ends."""
    with suppress(OSError, ssl.SSLError, asyncio.IncompleteReadError):
        while True:
            head = await source.readuntil(_END_OF_HEAD)
            content = await source.readexactly(_length(head))
            note(head, len(content))
            for part in filter(None, (head, content)):  # in two writes, as Flower's server does: each is a TLS record
                target.write(part)
            await target.drain()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


class CountingProxy:
    """A proxy that forwards connections to the server, and counts connections, requests, and bytes in both directions.

    The content is encrypted. So data from a client counts as a new request if it follows data from the server.
    """

    def __init__(self, port: int, target: int) -> None:
        self.down = self.up = self.connections = self.requests = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                mine, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.connections += 1
            last = [""]
            threading.Thread(target=self._copy, args=(mine, theirs, "up", last), daemon=True).start()
            threading.Thread(target=self._copy, args=(theirs, mine, "down", last), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counter: str, last: list[str]) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                setattr(self, counter, getattr(self, counter) + len(part))
                self.requests += counter == "up" and last[0] == "down"
                last[0] = counter
                target.sendall(part)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def counts(self) -> dict[str, int]:
        """Return what was counted so far."""
        return {"down": self.down, "up": self.up, "connections": self.connections, "requests": self.requests}

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()
