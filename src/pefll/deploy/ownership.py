"""Restricts each client to its own messages and objects.

Flower checks that the node named in a request signed it. It does not check to whom the requested object belongs, or
which sender a message names. So a client that knows an object's name could read, overwrite or delete the object, and
could send messages in the server's name. Names are hashes or random numbers, which are hard to guess. With these
checks, even a correct guess is useless.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

_BAD, _FORBIDDEN = 400, 403
_YEAR = 366 * 24 * 3600.0
# Flower's errors for a reply that it cannot parse, or that names an unknown run. Database errors are not in the list.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Remembered messages of a node. A node works on one message at a time, but a restarted node may finish earlier ones.
_REMEMBERED = 8
Handler = Callable[..., Any]


class Ownership:
    """Remembers which messages, objects and transfers Flower gave to which node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: defaultdict[int, dict[str, frozenset[str]]] = defaultdict(dict)
        self._transfers: defaultdict[int, dict[str, None]] = defaultdict(dict)

    def guard(self, handlers: Any) -> None:
        """Add a check to each of Flower's functions that handle a client's request for a message or an object.

        Args:
            handlers: Flower's module of these functions, or an object with the same names.
        """
        before = {"push_messages": self._check_sender, "push_object": self._check_transfer}
        before |= {"pull_object": self._check_object, "confirm_message_received": self._check_message}
        handlers.push_messages = _blaming_sender(handlers.push_messages)
        after = {"pull_messages": self._note_messages, "push_messages": self._note_transfer}
        for name in before.keys() | after.keys():
            setattr(handlers, name, _checked(getattr(handlers, name), before.get(name), after.get(name)))

    def _check_sender(self, request: Any) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(_BAD, "a client sends one reply at a time, with the tree of its objects")
        if not all(0 <= seconds <= _YEAR for seconds in request.clientapp_runtime_list):
            raise HTTPException(_BAD, "an app runs for 0 s to a year")
        for message in request.messages_list:
            if message.metadata.src_node_id != request.node.node_id or not message.metadata.reply_to_message_id:
                raise HTTPException(_FORBIDDEN, "a client sends replies, in its own name")
            # NaN is refused: SQLite stores it as NULL, and then the server's app gets no replies at all. An expired
            # reply is allowed, because Flower drops it.
            age = time.time() - message.metadata.created_at
            if not (abs(age) <= _YEAR and abs(message.metadata.ttl) <= _YEAR):
                raise HTTPException(_BAD, "a reply is made now and lives for less than a year")

    def _check_transfer(self, request: Any) -> None:
        with self._lock:
            allowed = request.session_id in self._transfers[request.node.node_id]
        if not allowed:
            raise HTTPException(_FORBIDDEN, "the transfer does not belong to this client")

    def _check_object(self, request: Any) -> None:
        with self._lock:
            mine = self._messages[request.node.node_id].values()
            allowed = any(request.object_id in objects for objects in mine)
        if not allowed:
            raise HTTPException(_FORBIDDEN, "the object does not belong to this client")

    def _check_message(self, request: Any) -> None:
        with self._lock:
            allowed = request.message_object_id in self._messages[request.node.node_id]
        if not allowed:
            raise HTTPException(_FORBIDDEN, "the message does not belong to this client")

    def _note_messages(self, request: Any, response: Any) -> None:
        with self._lock:
            mine = self._messages[request.node.node_id]
            for tree in response.message_object_trees:
                mine[tree.object_id] = frozenset(part.object_id for part in iterate_object_tree(tree))
            _drop_oldest(mine)

    def _note_transfer(self, request: Any, response: Any) -> None:
        with self._lock:
            mine = self._transfers[request.node.node_id]
            mine[response.session_id] = None
            _drop_oldest(mine)


def _checked(
    handler: Handler, before: Callable[[Any], None] | None, after: Callable[[Any, Any], None] | None
) -> Handler:
    def checked(request: Any, *words: Any, **named: Any) -> Any:
        if before is not None:
            before(request)
        response = handler(request, *words, **named)
        if after is not None:
            after(request, response)
        return response

    return checked


def _blaming_sender(handler: Handler) -> Handler:
    def blaming(*words: Any, **named: Any) -> Any:
        try:
            return handler(*words, **named)
        except _UNREADABLE as error:
            raise HTTPException(_BAD, f"this reply cannot be stored ({type(error).__name__})") from error

    return blaming


def _drop_oldest(mine: dict[str, Any]) -> None:
    while len(mine) > _REMEMBERED:
        del mine[next(iter(mine))]
