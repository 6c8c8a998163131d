"""Asks connected nodes who they are. The server waits for each node only once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pefll.engines.flower.protocol.message import pack, printable, sender_of
from pefll.engines.flower.protocol.names import ECHO, HELLO
from pefll.engines.flower.server.exchange import Outcome, OutgoingRequest, collect, exchange, send
from pefll.engines.flower.server.reply import hello_of
from pefll.engines.flower.server.terms import Report, Terms

# Seconds between a failed hello and the next one: the first pause, and the longest. Each failure doubles the pause.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 640.0
_PART_SECONDS = 1.0  # seconds in total to wait for missing parts of late replies


class Hellos:
    """Asks nodes who they are.

    The server waits `exchange_seconds` for a node's first reply. If there is no valid reply, the server asks again
    after pauses, but does not wait: a later call of `ask` looks whether the reply has come. Otherwise a client that is
    online and never answers would stop every round.

    Args:
        grid: Flower's connection to the nodes.
        agreement: SHA-256 of the agreement.
        terms: has the deadline of a reply.
        report: called with one sentence for each failure.
    """

    def __init__(self, grid: Any, agreement: str, terms: Terms, report: Report) -> None:
        self._grid, self._terms, self._report = grid, terms, report
        self._header = dict.fromkeys(ECHO, 0) | {"task": HELLO, "cache": "", "agreement": agreement}
        # Failures in a row, by node. Never remove a node, even if it answers or leaves: else the server waits again.
        self._failures: dict[int, int] = {}
        self._ask_at: dict[int, float] = {}
        self._waiting: dict[str, int] = {}  # nodes that were asked again, by the name of the message
        self._ends: dict[int, float] = {}

    def ask(self, unmet: Iterable[int], keys: dict[int, str]) -> dict[int, dict[str, Any]]:
        """Ask nodes who they are, and return the valid replies that have come so far, by node.

        Args:
            unmet: connected nodes that are not identified yet.
            keys: for every connected node, the name that its key is registered for; "" for no key.
        """
        self._forget_all_but(keys)
        senders: dict[int, str] = {}

        def accept(node: int, content: Any) -> dict[str, Any]:
            senders[node] = ""
            senders[node] = sender_of(content)  # works even if nothing else can be read
            return hello_of(content)

        unmet = list(unmet)
        faults: dict[int, str] = {}
        self._send_again([node for node in unmet if node in self._failures], faults)
        first = exchange(
            self._grid,
            self._requests([node for node in unmet if node not in self._failures]),
            self._terms.exchange_seconds,
            HELLO,
            accept,
        )
        late = self._collect(accept)
        for node, reason in (faults | first.faults | late.faults).items():
            pause = self._note_failure(node)
            again = f"; it is asked again in {pause:.0f} s, and the others do not wait for it"
            if node in senders:  # the reason says what to do; a client that connects again is asked at once
                again = ""
            self._report(f"{_who(node, senders.get(node, ''), keys[node])} {reason}{again}")
        return first.replies | late.replies

    def _requests(self, nodes: Iterable[int]) -> dict[int, OutgoingRequest]:
        return {node: OutgoingRequest(node, f"query.{HELLO}", pack(self._header, {})) for node in nodes}

    def _send_again(self, nodes: list[int], faults: dict[int, str]) -> None:
        """Send another request to the nodes whose pause is over."""
        now = time.monotonic()
        due = [node for node in nodes if node not in self._ends and now >= self._ask_at.get(node, 0.0)]
        sent = send(self._grid, self._requests(due), self._terms.exchange_seconds, HELLO, faults)
        self._waiting |= sent
        self._ends |= dict.fromkeys(sent.values(), now + self._terms.exchange_seconds)

    def _collect(self, accept: Callable[[int, Any], dict[str, Any]]) -> Outcome[dict[str, Any]]:
        """Return the replies and faults of the repeated requests so far."""
        late = collect(self._grid, self._waiting, _PART_SECONDS, accept)
        now = time.monotonic()
        for name, node in list(self._waiting.items()):
            if now >= self._ends[node]:
                del self._waiting[name]
                late.faults[node] = f"did not answer within {self._terms.exchange_seconds:.3g} s"
        for node in (*late.replies, *late.faults):
            self._ends.pop(node, None)
        for node in late.replies:
            self._failures[node] = 0
        return late

    def _note_failure(self, node: int) -> float:
        """Count a failure of a node, and return the seconds until the node is asked again."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._failures.get(node, 0), 32))
        self._failures[node] = self._failures.get(node, 0) + 1
        self._ask_at[node] = time.monotonic() + pause
        return pause

    def _forget_all_but(self, online: Iterable[int]) -> None:
        """Forget requests and pauses of nodes that have left. They are asked at once when they come back."""
        there = set(online)
        self._ask_at = {node: at for node, at in self._ask_at.items() if node in there}
        self._ends = {node: at for node, at in self._ends.items() if node in there}
        self._waiting = {name: node for name, node in self._waiting.items() if node in there}


def _who(node: int, sender: str, key: str) -> str:
    """Return the beginning of a sentence about a node."""
    if sender:
        return f"client {sender}"
    return (
        f"the node with the key of {printable(key, 80)}, asked who it is," if key else f"node {node}, asked who it is,"
    )
