"""One exchange: sends a request to each client, and collects the reply of each, or the reason why there is none."""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import ERROR
from typing import Any, Generic, NamedTuple, TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import UnexpectedObjectContentError, pull_objects
from flwr.superlink.grid import http_grid
from google.protobuf.message import DecodeError

from pefll.engines.flower.protocol.message import BadMessage

T = TypeVar("T")
# Seconds between polls for replies, at first and later. Flower itself polls every 3 seconds.
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.2
# Errors that Flower raises when it cannot parse a reply: a client may send any bytes. Errors for a lost connection to
# Flower's server are not in this list.
_NO_MESSAGE = (
    ArithmeticError,
    AttributeError,
    DecodeError,
    LookupError,
    RecursionError,
    TypeError,
    UnexpectedObjectContentError,
    ValueError,
    struct.error,
)
_SERVER_FAILED = 500  # HTTP status if a reply cannot be served; a stopped run or an invalid token has another status
# Seconds between polls for missing parts of a reply. Flower itself waits up to two hours for them.
_FIRST_PART_PAUSE, _LAST_PART_PAUSE = 0.1, 1.0
_EXTRA_SECONDS = 5.0  # Flower deletes a message this long after the deadline, so that the last poll still finds it
_deadline = threading.local()
_ERRORS = {
    1: "could not load the app",
    2: "failed in its app",
    3: "did not send its whole reply within the life of the message",
    4: "did not answer within the life of the message",
    5: "is gone",
    8: "was killed while it worked",
}


class OutgoingRequest(NamedTuple):
    """A request: Flower's number of the node, the message type, and the content."""

    node: int
    kind: str
    content: RecordDict


@dataclass
class Outcome(Generic[T]):
    """The result of an exchange.

    Attributes:
        replies: the valid replies, by client.
        faults: a reason for each client without a valid reply. It is the end of a sentence that begins with its name.
        strays: number of replies that nobody asked for, or that came twice. They are ignored.
        sent_again: clients that got the same request a second time.
    """

    replies: dict[int, T]
    faults: dict[int, str]
    strays: int = 0
    sent_again: list[int] = field(default_factory=list)


def exchange(
    grid: Grid,
    requests: Mapping[int, OutgoingRequest],
    seconds: float,
    group: str,
    accept: Callable[[int, RecordDict], T],
) -> Outcome[T]:
    """Send each client its request, and wait until all have replied or the time is over.

    Args:
        grid: Flower's connection to the nodes.
        requests: the request for each client.
        seconds: how long to wait.
        group: name of the exchange in Flower's logs.
        accept: returns the content of a client's reply; BadMessage if it is invalid.
    """
    outcome: Outcome[T] = Outcome({}, {})
    ends = time.monotonic() + seconds
    waiting = send(grid, requests, seconds, group, outcome.faults)
    one_by_one = False
    pause = _FIRST_PAUSE
    while waiting:
        is_last_poll = time.monotonic() >= ends
        try:
            replies = (
                _pull_each(grid, waiting, ends, outcome.faults) if one_by_one else _pull(grid, list(waiting), ends)
            )
        except _NotPulled:
            # Flower reads several replies at a time. If it cannot read one, it loses all of them. So send the request
            # again to every client without a reply, and read the replies one by one. A repeated request gets the same
            # reply, because a reply depends only on the request.
            replies, one_by_one = [], True
            again = {client: requests[client] for client in waiting.values()}
            waiting = send(grid, again, ends - time.monotonic(), group, outcome.faults)
            outcome.sent_again += waiting.values()
        _take(replies, waiting, accept, outcome)
        # One more poll begins after the deadline, because replies may have come while the poll before it was reading.
        left = ends - time.monotonic()
        if is_last_poll:
            break
        if waiting:
            pause = _FIRST_PAUSE if replies else min(_LAST_PAUSE, 1.5 * pause)
            time.sleep(max(0.0, min(pause, left)))
    for client in waiting.values():
        outcome.faults[client] = f"did not answer within {seconds:.3g} s"
    return outcome


def collect(grid: Grid, waiting: dict[str, int], seconds: float, accept: Callable[[int, RecordDict], T]) -> Outcome[T]:
    """Return the replies that have already come to requests of `send`, and remove their clients from `waiting`.

    Args:
        grid: Flower's connection to the nodes.
        waiting: the client of each message, by the message's name. This function removes items.
        seconds: how long to wait for missing parts of replies that have begun to arrive.
        accept: returns the content of a client's reply; BadMessage if it is invalid.
    """
    outcome: Outcome[T] = Outcome({}, {})
    replies = _pull_each(grid, waiting, time.monotonic() + seconds, outcome.faults)
    _take(replies, waiting, accept, outcome)
    return outcome


def _take(
    replies: list[Message], waiting: dict[str, int], accept: Callable[[int, RecordDict], T], outcome: Outcome[T]
) -> None:
    """Read replies, note the results in `outcome`, and remove the clients from `waiting`."""
    for reply in replies:
        asked = waiting.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            outcome.strays += 1
            continue
        try:
            outcome.replies[asked] = _read(reply, asked, accept)
        except BadMessage as error:
            outcome.faults[asked] = str(error)


def send(
    grid: Grid, requests: Mapping[int, OutgoingRequest], seconds: float, group: str, faults: dict[int, str]
) -> dict[str, int]:
    """Send requests, and return the client of each message, by its name. Note unreachable clients in `faults`."""
    if not requests:
        return {}
    messages = [
        Message(request.content, request.node, request.kind, ttl=max(seconds, 0.0) + _EXTRA_SECONDS, group_id=group)
        for request in requests.values()
    ]
    names = list(grid.push_messages(messages))
    waiting: dict[str, int] = {}
    for client, name in zip(requests, names + [""] * (len(requests) - len(names)), strict=True):
        if name:
            waiting[name] = client
        else:
            faults[client] = "could not be sent the request: it is not connected any more"
    return waiting


class _NotPulled(Exception):
    """A reply has come, but Flower cannot read it. The exception's cause says why."""


def _pull(grid: Grid, names: list[str], ends: float) -> list[Message]:
    """Return the replies that have come; wait for missing parts until `ends`, on the monotonic clock.

    Raises:
        _NotPulled: if Flower cannot read one of the replies.
    """
    _deadline.ends = ends
    try:
        return list(grid.pull_messages(names))
    except _NO_MESSAGE as error:
        raise _NotPulled from error
    except httpx.HTTPStatusError as error:
        if error.response.status_code != _SERVER_FAILED:
            raise
        raise _NotPulled from error
    finally:
        del _deadline.ends


def _pull_parts_in_time(*words: Any, **named: Any) -> dict[str, bytes]:
    """Call Flower's `pull_objects` with the deadline of the exchange instead of Flower's limits."""
    ends = getattr(_deadline, "ends", None)
    if ends is not None:
        named |= {"initial_backoff": _FIRST_PART_PAUSE, "backoff_cap": _LAST_PART_PAUSE}
        named |= {"max_time": max(0.0, ends - time.monotonic()), "max_tries_per_object": None}
    parts: dict[str, bytes] = pull_objects(*words, **named)
    return parts


http_grid.pull_objects = _pull_parts_in_time


def _pull_each(grid: Grid, waiting: dict[str, int], ends: float, faults: dict[int, str]) -> list[Message]:
    """Return the replies that have come. Note a fault for a reply that Flower cannot read, and wait for it no more."""
    replies: list[Message] = []
    for name, client in list(waiting.items()):
        try:
            replies += _pull(grid, [name], ends)
        except _NotPulled as error:
            faults[waiting.pop(name)] = f"sent a reply that Flower cannot read ({type(error.__cause__).__name__})"
            log(ERROR, "the reply of client %d: %s", client, traceback.format_exc())
    return replies


def _read(reply: Message, client: int, accept: Callable[[int, RecordDict], T]) -> T:
    """Return the result of `accept` for a reply.

    Raises:
        BadMessage: for any error, because a client may send any bytes. The server does nothing else in this function,
            so that no error of the server is blamed on a client.
    """
    try:
        if reply.has_error():
            raise BadMessage(_ERRORS.get(reply.error.code, f"failed with Flower's error {reply.error.code}"))
        return accept(client, reply.content)
    except BadMessage:
        raise
    except Exception as error:
        log(ERROR, "the reply of client %d: %s", client, traceback.format_exc())
        raise BadMessage(f"sent a reply that cannot be read ({type(error).__name__})") from error
