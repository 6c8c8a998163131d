"""ASGI gateways in front of Flower: each port accepts a fixed list of routes and checks credentials.

Flower's SuperLink is one web application for clients, operators and apps. The gateways give it two ports. The clients'
port forwards only requests of registered clients. The other port accepts connections from this machine only. It is for
the operator, who has a secret, and for the server's app, which has a token from Flower.
"""

from __future__ import annotations

import asyncio
import hmac
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from datetime import datetime
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TASK_TOKEN_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from pefll.deploy.admission import Admission

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIB = 1 << 20
# Routes for clients, with the maximum size of a body in bytes. An object may contain a whole model.
FLEET = {
    f"/v1/fleet/{route}": MIB * (1024 if route == "push-object" else 16)
    for route in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
}
# Routes for the server's app. Each request needs the token of the run.
RUNTIME = frozenset(
    f"/v1/runtime/{route}"
    for route in (
        "send-task-heartbeat",
        "pull-task-input",
        "push-task-output",
        "push-object",
        "pull-object",
        "confirm-message-received",
        "push-logs",
        "push-messages",
        "pull-messages",
        "get-nodes",
    )
)
CONTROL = "/v1/control/"
# Operators cannot register keys here; they add files to keys/ instead.
REFUSED_TO_OPERATORS = frozenset({f"{CONTROL}register-node"})
MOST_HEAD_BYTES = 16 << 10
IDLE_SECONDS = 60  # the longest pause within a request's body


class FleetGateway:
    """The clients' port. Forwards requests to routes for clients, if a known key signed them and they are small enough.

    It checks the key before it reads the body, so that unknown senders cannot fill the memory. Flower checks the key
    and the time again. It also checks that the key belongs to the node named in the request.
    """

    def __init__(self, app: App, admission: Admission) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return None
        limit = FLEET.get(scope["path"]) if scope["method"] == "POST" else None
        if limit is None:
            return await _refuse(send, 404)
        if _head_bytes(scope) > MOST_HEAD_BYTES:
            return await _refuse(send, 431)
        if self._admission.has_changed():
            await asyncio.to_thread(self._admission.update)
        if not self._is_known(scope):
            return await _refuse(send, 401)
        if _declared_length(scope) > limit:
            return await _refuse(send, 413)
        return await self._app(scope, *_bounded(receive, send, limit))

    def _is_known(self, scope: Scope) -> bool:
        names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
        try:
            key, signature, stamp = (_one_header(scope, name) for name in names)
            public_key = b64decode(key, validate=True)
            age = (now() - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
            return (
                self._admission.name_of(public_key) is not None
                and -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
                and bool(verify_signature(bytes_to_public_key(public_key), stamp, b64decode(signature, validate=True)))
            )
        except (ValueError, TypeError):  # base64's error is a ValueError; a time without a zone is a TypeError
            return False


class OperatorGateway:
    """The local port. Forwards commands with the operator's secret, and requests of the server's app.

    It checks credentials before it reads the body. Flower checks them again.

    Args:
        app: Flower's application.
        token: the operator's secret.
        is_running: function that returns whether a token belongs to a running app.
    """

    def __init__(self, app: App, token: str, is_running: Callable[[bytes], bool]) -> None:
        self._app, self._expected, self._is_running = app, f"Bearer {token}".encode(), is_running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or handle the application's start and end."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        path = scope["path"] if scope["method"] == "POST" else ""
        if path not in RUNTIME and not path.startswith(CONTROL):
            return await _refuse(send, 404)
        try:
            if path in RUNTIME:
                allowed = self._is_running(_one_header(scope, TASK_TOKEN_HEADER))
            else:
                allowed = hmac.compare_digest(_one_header(scope, "authorization"), self._expected)
        except ValueError:
            allowed = False
        if not allowed:
            return await _refuse(send, 401)
        if path in REFUSED_TO_OPERATORS:
            return await _refuse(send, 403, b"add keys with: pefll flower add FEDERATION NAME")
        return await self._app(scope, receive, send)


def _bounded(receive: Receive, send: Send, limit: int) -> tuple[Receive, Send]:
    """Return versions of `receive` and `send` that end a request if it is too long or too slow.

    The app then sees a disconnected client. The sender gets an error instead of the app's answer, and the connection is
    closed. Otherwise the server would read and discard the rest of the body.
    """
    got, status, answered = 0, 0, False

    async def bounded_receive() -> MutableMapping[str, Any]:
        nonlocal got, status
        if status:
            return {"type": "http.disconnect"}
        try:
            message = await asyncio.wait_for(receive(), IDLE_SECONDS) if got >= 0 else await receive()
        except TimeoutError:
            status = 408
            return {"type": "http.disconnect"}
        if message["type"] == "http.request":
            got += len(message.get("body", b""))
            if got > limit:
                status = 413
                return {"type": "http.disconnect"}
            if not message.get("more_body", False):
                got = -1  # the body is complete; waiting for a disconnect has no time limit
        return message

    async def bounded_send(message: MutableMapping[str, Any]) -> None:
        nonlocal answered
        if not status:
            await send(message)
        elif not answered:
            answered = True
            await _refuse(send, status)

    return bounded_receive, bounded_send


def _one_header(scope: Scope, name: str) -> bytes:
    """Return the value of a header; ValueError unless it occurs exactly once."""
    found = _headers(scope, name)
    if len(found) != 1:
        raise ValueError(f"{len(found)} headers {name}")
    return found[0]


def _headers(scope: Scope, name: str) -> list[bytes]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value for key, value in headers if key == name.lower().encode()]


def _head_bytes(scope: Scope) -> int:
    """Return the length of a request's first line and headers.

    The gateway limits it, because the HTTP parser has no limit for headers that arrive in one packet.
    """
    line = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


def _declared_length(scope: Scope) -> int:
    found = _headers(scope, "content-length")
    return int(found[0]) if len(found) == 1 and found[0].isdigit() else 0


async def _refuse(send: Send, status: int, sentence: bytes = b"") -> None:
    """Send a status without details, and close the connection so that the rest of the request is not read."""
    headers = [(b"content-length", str(len(sentence)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": sentence})
