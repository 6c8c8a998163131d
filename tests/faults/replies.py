"""Malformed replies: each is left out, or says the same as the reply that it was made from; the server goes on.

    python -m tests.faults.replies --count 300 --out results/faults.json

A reply of a real client is damaged, in every exchange of some methods. The state after the round must then be bit for
bit that of the serial engine in which the client was absent, or that of an undisturbed round. A number that a client
chooses freely, such as a weight of its model, is not damaged: no server can tell that from another client's honest one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from rich.progress import track

from pefll.core.tree import leaves
from pefll.data.samples import TEST
from pefll.engines.flower.protocol.message import RECORD
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.training.evaluation import client_scores
from tests.engines.flower.federations import Setting, sampled, serial_state, setting, sha256
from tests.faults.record import FILE, record
from tests.faults.reply_damages import DAMAGES, Parts, Random

ROUND = 1
TARGETS = [
    ("pefll", "query.hello"),
    ("pefll", "train.describe"),
    ("pefll", "train.adapt"),
    ("pefll", "train.describe_backward"),
    ("pefll", "query.describe_all"),
    ("pefll", "evaluate.predict"),
    ("fedavg", "train.train"),
    ("fedavg", "evaluate.predict"),
    ("fedrep", "train.train"),
]


class Tried:
    """A method's clients, the state before the round, and what the round comes to with and without one of them."""

    def __init__(self, folder: Path, method: str) -> None:
        folder.mkdir()
        self.here: Setting = setting(folder, method)
        self.said: list[str] = []
        self.engine = self.new_engine()
        self.before = self.engine.advance(self.engine.start(), 0, ROUND)
        self.offender = sampled(self.here, ROUND)[1]
        self.whole = sha256(serial_state(self.here, rounds=ROUND + 1))
        self.without = sha256(serial_state(self.here, {ROUND: {self.offender}}, rounds=ROUND + 1))
        self.scores = self.evaluate(self.engine)
        assert self.whole != self.without

    def new_engine(self) -> FlowerEngine:
        """Return an engine that has met nobody yet."""
        return self.here.engine(report=self.said.append)

    def evaluate(self, engine: FlowerEngine) -> np.ndarray[Any, Any]:
        """Return every client's scores, [6, 4]."""
        return client_scores(engine, engine.method, self.before, np.arange(6), TEST)

    def bits(self, state: Any) -> str:
        """Return the hash of a state, with what clients keep in place of its tickets."""
        rows = [
            torch.stack([self.here.kept(client, row) for client, row in enumerate(leaf)]) if leaf.dim() == 2 else leaf
            for leaf in leaves(state)
        ]
        return sha256(tuple(rows) if self.here.agreement.method == "fedrep" else state)

    def after(self, kind: str, damage: Callable[[Message, Message], list[Message]]) -> str:
        """Do a round or an evaluation with one damaged reply: 'left out', 'the same', or what is wrong."""
        self.said.clear()
        times = 0

        def transport(node: int, request: Message, deliver: Callable[[Message], Message]) -> list[Message]:
            nonlocal times
            if node != 1000 + self.offender or request.metadata.message_type != kind:
                return [deliver(request)]
            times += 1
            return damage(request, deliver(request))

        self.here.grid.transport = transport
        engine = self.new_engine() if kind == "query.hello" else self.engine
        try:
            if kind.startswith("train.") or kind == "query.hello":
                found = self.bits(engine.advance(self.before, ROUND, 1))
                outcome = {self.whole: "the same", self.without: "left out"}.get(
                    found, "accepted, and changed the state"
                )
            else:
                outcome = self._of_scores(self.evaluate(engine))
        finally:
            self.here.grid.transport = lambda node, request, deliver: [deliver(request)]
            if engine is not self.engine:
                engine.close()
        if not times:
            return "never sent"
        if outcome == "left out" and not any(
            f"client-{self.offender:03d}" in line or "node" in line for line in self.said
        ):
            return "left out without a word"
        if any(not line.isprintable() for line in self.said):
            return "wrote to the terminal"
        return outcome

    def _of_scores(self, found: np.ndarray[Any, Any]) -> str:
        others = np.delete(found, self.offender, axis=0) == np.delete(self.scores, self.offender, axis=0)
        mine = found[self.offender]
        if not others.all():
            return "accepted, and changed others' scores"
        return (
            "left out" if not mine.any() else "the same" if (mine == self.scores[self.offender]).all() else "accepted"
        )


def damaged(random: Random, name: Callable[[Parts, Random], RecordDict | None]) -> Callable[..., list[Message]]:
    """Return what makes the replies to a request of a real one."""

    def act(request: Message, reply: Message) -> list[Message]:
        parts = dict(reply.content[RECORD])
        content = name(parts, random)
        return [Message(RecordDict({RECORD: ConfigRecord(parts)}) if content is None else content, reply_to=request)]

    return act


def lost(random: Random) -> Callable[..., list[Message]]:
    """Return what makes no reply of a real one, an error, or two."""
    kind, code = random.integers(3), int(random.choice([0, 1, 2, 3, 5, 8, 99]))

    def act(request: Message, reply: Message) -> list[Message]:
        return [[], [Message(Error(code, "no"), reply_to=request)], [reply, reply]][kind]

    return act


class Tracebacks(logging.Handler):
    """Counts tracebacks in Flower's log."""

    seen = 0

    def emit(self, entry: logging.LogRecord) -> None:
        self.seen += "Traceback" in entry.getMessage() or entry.exc_info is not None


def campaign(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Damage so many replies, each in its own way, and count what happens."""
    tried = {method: Tried(folder / method, method) for method in {method: 0 for method, _ in TARGETS}}
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    tracebacks, log = Tracebacks(), logging.getLogger("flwr")
    handlers, log.handlers = log.handlers, [tracebacks]
    try:
        for number in track(range(count), "malformed replies", disable=not sys.stderr.isatty()):
            random = np.random.default_rng([seed, number])
            method, kind = TARGETS[number % len(TARGETS)]
            place = int(random.integers(len(DAMAGES) + 1))
            name = DAMAGES[place].__name__ if place < len(DAMAGES) else "lost"
            act = damaged(random, DAMAGES[place]) if place < len(DAMAGES) else lost(random)
            before = tracebacks.seen
            try:
                outcome = tried[method].after(kind, act)
            except Exception as error:  # noqa: BLE001 - whatever ends the server is what is looked for
                outcome = f"ended the server: {type(error).__name__}: {error}"
            outcomes[outcome.partition(":")[0]] += 1
            if outcome not in ("left out", "the same") or tracebacks.seen > before:
                faults.append(f"{number}: {method} {kind} {name}: {outcome}, {tracebacks.seen - before} tracebacks")
    finally:
        log.handlers = handlers
        for one in tried.values():
            one.engine.close()
    ended = outcomes["ended the server"]
    return {
        "tried": count,
        "left_out": outcomes["left out"],
        "same_result": outcomes["the same"],
        "accepted_silently": count - outcomes["left out"] - outcomes["the same"] - ended,
        "tracebacks": tracebacks.seen + ended,
        "seed": seed,
        "faults": faults,
    }


def main() -> None:
    """Run the campaign and keep its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FILE)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = campaign(chosen.count, chosen.seed, Path(folder))
    command = f"python -m tests.faults.replies --count {chosen.count} --seed {chosen.seed} --out {chosen.out}"
    record(chosen.out, "malformed replies", command, figures)
    print(json.dumps(figures, indent=2))
    sys.exit(1 if figures["faults"] else 0)


if __name__ == "__main__":
    main()
