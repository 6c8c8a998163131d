"""One exchange: a request to each of some clients, and their replies, or why there is none."""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
# Flower's own way of waiting looks for replies every 3 seconds. This looks often at first and then less so.
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.2
# What Flower raises where the bytes of a reply, which are its sender's choice, are no message. That a server is gone is
# none of these.
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
_SERVER_FAILED = 500  # at what is asked for; that a run was stopped, or that its token is not valid, is below it
# Flower waits up to two hours for the parts of a reply that was announced, whatever the deadline, and looks for them
# less and less often.
_FIRST_LOOK_FOR_A_PART, _LAST_LOOK_FOR_A_PART = 0.1, 1.0
_LONGER = 5.0  # seconds
_deadline = threading.local()
_ERROR = 40  # a level of Python's logging
_ERRORS = {
    1: "could not load the app",
    2: "failed in its app",
    3: "did not send its whole reply within the life of the message",
    4: "did not answer within the life of the message",
    5: "is gone",
    8: "was killed while it worked",
}


class OutgoingRequest(NamedTuple):
    """A request.

    Attributes:
        node: where to, as Flower numbers it.
        kind: the message type.
        content: what it says.
    """

    node: int
    kind: str
    content: RecordDict


@dataclass
class Outcome(Generic[T]):
    """What came of an exchange.

    Attributes:
        replies: of those that answered as they should, by client.
        faults: what the others did, as the end of a sentence that begins with their name.
        strays: replies that nobody asked for or that came twice; none of them was used.
        sent_again: who was sent the same letter a second time.
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
    """Send each client its letter and wait until everybody has answered or the time is over.

    Args:
        grid: Flower's way to the nodes.
        requests: by client.
        seconds: how long to wait; the messages live a little longer, for the last look.
        group: what Flower's logs call the exchange.
        accept: makes of a reply what is wanted; BadMessage where it is not as it should be.
    """
    outcome: Outcome[T] = Outcome({}, {})
    ends = time.monotonic() + seconds
    waiting = _send(grid, requests, seconds, group, outcome.faults)
    one_by_one = False
    pause = _FIRST_LOOK
    while waiting:
        is_last_look = time.monotonic() >= ends
        try:
            replies = (
                _pull_each(grid, waiting, ends, outcome.faults) if one_by_one else _pull(grid, list(waiting), ends)
            )
        except _NotPulled:
            # Flower reads replies several at a time, and one that it cannot read takes others along. Who was not heard
            # is asked again, which changes nothing: a reply is a function of the request. Then each is read alone.
            replies, one_by_one = [], True
            again = {client: requests[client] for client in waiting.values()}
            waiting = _send(grid, again, ends - time.monotonic(), group, outcome.faults)
            outcome.sent_again += waiting.values()
        for reply in replies:
            asked = waiting.pop(reply.metadata.reply_to_message_id, None)
            if asked is None:
                outcome.strays += 1
                continue
            try:
                outcome.replies[asked] = _read(reply, asked, accept)
            except BadMessage as error:
                outcome.faults[asked] = str(error)
        # The last look begins after the end: while one client's reply was waited for, others may have answered.
        left = ends - time.monotonic()
        if is_last_look:
            break
        if waiting:
            pause = _FIRST_LOOK if replies else min(_LAST_LOOK, 1.5 * pause)
            time.sleep(max(0.0, min(pause, left)))
    for client in waiting.values():
        outcome.faults[client] = f"did not answer within {seconds:.3g} s"
    return outcome


def _send(
    grid: Grid, requests: Mapping[int, OutgoingRequest], seconds: float, group: str, faults: dict[int, str]
) -> dict[str, int]:
    """Send requests; return who is waited for, by the names of the messages, and note who could not be sent one."""
    if not requests:
        return {}
    messages = [
        Message(request.content, request.node, request.kind, ttl=max(seconds, 0.0) + _LONGER, group_id=group)
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
    """A reply is there and cannot be had; its cause says why."""


def _pull(grid: Grid, names: list[str], ends: float) -> list[Message]:
    """Return the replies that are there; wait for parts that are missing until a time of the monotonic clock.

    Raises:
        _NotPulled: for the bytes of one of them, which are its sender's choice.
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
    """Do what Flower's own function does, but keep the deadline of the exchange; every part is looked for once."""
    ends = getattr(_deadline, "ends", None)
    if ends is not None:
        named |= {"initial_backoff": _FIRST_LOOK_FOR_A_PART, "backoff_cap": _LAST_LOOK_FOR_A_PART}
        named |= {"max_time": max(0.0, ends - time.monotonic()), "max_tries_per_object": None}
    parts: dict[str, bytes] = pull_objects(*words, **named)
    return parts


http_grid.pull_objects = _pull_parts_in_time


def _pull_each(grid: Grid, waiting: dict[str, int], ends: float, faults: dict[int, str]) -> list[Message]:
    """Return the replies that are there; who sent one that Flower cannot read is noted and waited for no longer."""
    replies: list[Message] = []
    for name, client in list(waiting.items()):
        try:
            replies += _pull(grid, [name], ends)
        except _NotPulled as error:
            faults[waiting.pop(name)] = f"sent a reply that Flower cannot read ({type(error.__cause__).__name__})"
            log(_ERROR, "the reply of client %d: %s", client, traceback.format_exc())
    return replies


def _read(reply: Message, client: int, accept: Callable[[int, RecordDict], T]) -> T:
    """Return what is wanted of one reply.

    Raises:
        BadMessage: whatever it is that cannot be read, since every byte of a reply is its sender's choice. Nothing else
            of the server's work is done in here, so that no error of its own is taken for a client's.
    """
    try:
        if reply.has_error():
            raise BadMessage(_ERRORS.get(reply.error.code, f"failed with Flower's error {reply.error.code}"))
        return accept(client, reply.content)
    except BadMessage:
        raise
    except Exception as error:
        log(_ERROR, "the reply of client %d: %s", client, traceback.format_exc())
        raise BadMessage(f"sent a reply that cannot be read ({type(error).__name__})") from error
