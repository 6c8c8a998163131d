"""One exchange: a request to each of some clients, and their replies, or why there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from pefll.engines.flower.message import BadMessage
from pefll.errors import PefllError

try:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'") from None

T = TypeVar("T")
# Flower's own way of waiting looks for replies every 3 seconds. This looks often at first and then less so.
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.2
_ERRORS = {
    1: "could not load the app",
    2: "failed in its app",
    3: "did not answer within the life of the message",
    4: "did not answer within the life of the message",
    5: "is gone",
    8: "was killed while it worked",
}


class Letter(NamedTuple):
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
    """

    replies: dict[int, T]
    faults: dict[int, str]
    strays: int = 0


def exchange(
    grid: Grid,
    letters: Mapping[int, Letter],
    seconds: float,
    group: str,
    accept: Callable[[int, RecordDict], T],
) -> Outcome[T]:
    """Send each client its letter and wait until everybody has answered or the time is over.

    Args:
        grid: Flower's way to the nodes.
        letters: by client.
        seconds: how long to wait; also how long the messages live.
        group: what Flower's logs call the exchange.
        accept: makes of a reply what is wanted; BadMessage where it is not as it should be.
    """
    outcome: Outcome[T] = Outcome({}, {})
    if not letters:
        return outcome
    ends = time.monotonic() + seconds
    clients = list(letters)
    messages = [
        Message(letter.content, letter.node, letter.kind, ttl=max(seconds, 1e-3), group_id=group)
        for letter in letters.values()
    ]
    waiting: dict[str, int] = {}
    names = list(grid.push_messages(messages))
    for client, name in zip(clients, names + [""] * (len(clients) - len(names)), strict=True):
        if name:
            waiting[name] = client
        else:
            outcome.faults[client] = "could not be sent the request: it is not connected any more"
    pause = _FIRST_LOOK
    while waiting:
        replies = list(grid.pull_messages(list(waiting)))
        for reply in replies:
            asked = waiting.pop(reply.metadata.reply_to_message_id, None)
            if asked is None:
                outcome.strays += 1
                continue
            try:
                if reply.has_error():
                    raise BadMessage(_ERRORS.get(reply.error.code, f"failed with Flower's error {reply.error.code}"))
                outcome.replies[asked] = accept(asked, reply.content)
            except BadMessage as error:
                outcome.faults[asked] = str(error)
        left = ends - time.monotonic()
        if left <= 0:
            break
        if waiting:
            pause = _FIRST_LOOK if replies else min(_LAST_LOOK, 1.5 * pause)
            time.sleep(min(pause, left))
    for client in waiting.values():
        outcome.faults[client] = f"did not answer within {seconds:.3g} s"
    return outcome
