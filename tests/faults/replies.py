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
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from rich.progress import track

from pefll.data.federation import TEST
from pefll.engines.flower.engine import FlowerEngine
from pefll.engines.flower.message import RECORD, header_of, pack, tensors_of
from pefll.evaluation import client_scores
from pefll.tree import leaves
from tests.engines.flower.federations import Setting, sampled, serial_state, setting, sha256
from tests.faults.record import FILE, record

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
Random = np.random.Generator
Parts = dict[str, Any]  # of a message's one record: format, version, header, tensors, numbers
NONSENSE: list[Any] = [None, True, -1, 1.5, 1 << 70, "", "x" * 1000, [], [[]], {}, {"a": 1}, float("nan")]
FIELDS: list[Any] = [0, -1, 1.5, True, "", "nonsense", b"", b"\xff\xfe", [1, 2], ["a"], [b"a"], [0.5], 1 << 62]


# Damages: each gets the parts of a reply's record and changes them, or returns another content altogether.


def flip_header(parts: Parts, random: Random) -> None:
    """Replace some characters of the header."""
    parts["header"] = _flipped(parts["header"], random)


def flip_list(parts: Parts, random: Random) -> None:
    """Replace some characters of the list of tensors."""
    parts["tensors"] = _flipped(parts["tensors"], random)


def _flipped(text: str, random: Random) -> str:
    letters = list(text)
    for place in random.integers(0, max(1, len(letters)), random.integers(1, 9)):
        letters[place % max(1, len(letters))] = chr(int(random.integers(1, 256)))
    return "".join(letters)


def cut_text(parts: Parts, random: Random) -> None:
    """End the header or the list of tensors too early."""
    name = str(random.choice(["header", "tensors"]))
    parts[name] = parts[name][: int(random.integers(0, max(1, len(parts[name]))))]


def drop_key(parts: Parts, random: Random) -> None:
    """Leave out something that the header must say."""
    header = json.loads(parts["header"])
    del header[str(random.choice(sorted(set(header) - {"counts"})))]
    parts["header"] = json.dumps(header)


def change_value(parts: Parts, random: Random) -> None:
    """Let the header say something else: another round, another name, another type."""
    header = json.loads(parts["header"])
    key = str(random.choice(sorted(header)))
    others = [value for value in NONSENSE if value != header[key] and not (key == "counts" and value is None)]
    header[key] = others[random.integers(len(others))]
    if isinstance(json.loads(parts["header"])[key], int) and random.random() < 0.5:
        header[key] = json.loads(parts["header"])[key] + int(random.choice([-1, 1, 7]))
    parts["header"] = json.dumps(header)


def drop_field(parts: Parts, random: Random) -> None:
    """Leave out a field of the record."""
    del parts[str(random.choice(sorted(parts)))]


def change_field(parts: Parts, random: Random) -> None:
    """Give a field of the record another type or value."""
    name = str(random.choice(sorted(parts)))
    others = [value for value in FIELDS if value != parts[name]]
    parts[name] = others[random.integers(len(others))]


def cut_numbers(parts: Parts, random: Random) -> None:
    """Send fewer bytes of numbers than the list says, or more."""
    size = len(parts["numbers"])
    parts["numbers"] = (
        parts["numbers"][: random.integers(0, size)] if size and random.random() < 0.5 else b"7" * (size + 3)
    )


def not_finite(parts: Parts, random: Random) -> None:
    """Put NaN or infinity somewhere."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        leaf = tensors[str(random.choice(sorted(tensors)))]
        leaf.view(-1)[int(random.integers(leaf.numel()))] = float(random.choice([math.nan, math.inf, -math.inf]))

    _retensor(parts, spoil)


def huge_numbers(parts: Parts, random: Random) -> None:
    """Multiply everything by a number so large that no client means it."""
    factor = 10.0 ** int(random.integers(7, 30))

    def grow(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in tensors.values():
            leaf.mul_(factor).add_(factor)

    _retensor(parts, grow)


def odd_count(parts: Parts, random: Random) -> None:
    """Say a number of samples that cannot be: negative, a fraction, or more than were declared."""
    odd = float(random.choice([-1.0, -3.0, 0.5, 2.25, 1e6, 2.0**40, 3e38]))
    header = json.loads(parts["header"])
    if "counts" in header:
        parts["header"] = json.dumps(header | {"counts": [odd, 3, 2] if random.random() < 0.5 else [-1, 1 << 41, 2]})
        return

    def lie(tensors: dict[str, torch.Tensor]) -> None:
        counts = [leaf for leaf in tensors.values() if leaf.dim() == 0]
        if counts:  # the first one is the number of samples
            counts[0].fill_(odd)
        else:
            tensors["1"] = torch.tensor(odd)

    _retensor(parts, lie)


def other_shape(parts: Parts, random: Random) -> None:
    """Describe the same bytes as tensors of another shape or type."""
    listed = json.loads(parts["tensors"]) or [["0", "<f4", []]]
    entry = listed[random.integers(len(listed))]
    odd: list[Any] = [
        [-1],
        [1, *entry[2]],
        [*entry[2], 1],
        [1 << 61],
        [1 << 40, 1 << 40],
        [2.0],
        [True],
        "[]",
        [[]],
        [0],
    ]
    if random.random() < 0.7:
        entry[2] = odd[random.integers(len(odd))]
    else:
        entry[1] = str(random.choice(["<f8", "<i8", "|b1", ">f4", "<f2", "object", "<c8", "|S4"]))
    parts["tensors"] = json.dumps(listed)


def other_tensors(parts: Parts, random: Random) -> None:
    """Send too many tensors, some twice, under other names, or none."""
    listed = json.loads(parts["tensors"])
    kind = random.integers(4)
    if kind == 0:
        listed = [[str(place), "<f4", [0]] for place in range(2000)]
    elif kind == 1:
        listed = [*listed, *(listed or [["0", "<f4", [0]]])]
    elif kind == 2:
        listed = [[f"{name}x", *rest] for name, *rest in listed] or [["x", "<f4", [0]]]
    else:
        listed = [] if listed else [["0", "<f4", [0]]]
    parts["tensors"] = json.dumps(listed)


def deep_header(parts: Parts, random: Random) -> None:
    """Nest lists or objects in the header, or make it long."""
    depth = int(random.choice([33, 1000, 30_000]))
    kind = random.integers(3)
    if kind == 0:
        parts["header"] = "[" * depth + "]" * depth
    elif kind == 1:
        parts["header"] = '{"a":' * depth + "1" + "}" * depth
    else:
        parts["header"] = json.dumps(json.loads(parts["header"]) | {"more": "x" * 70_000})


def no_object(parts: Parts, random: Random) -> None:
    """Send a header that is JSON, but no object."""
    parts["header"] = str(random.choice(["null", "[]", "7", '"text"', "true", "", "{", "NaN", "1e999", '{"a":1}{}']))


def refuse(parts: Parts, random: Random) -> None:
    """Say that it refuses, or that it remembers nothing, in words of all kinds."""
    said: list[Any] = ["no", 7, None, "\x1b[2J\n\r", "x" * 5000, ["no"]]
    key = str(random.choice(["refusal", "missing"]))
    parts["header"] = json.dumps(json.loads(parts["header"]) | {key: said[random.integers(len(said))]})


def other_content(parts: Parts, random: Random) -> RecordDict:
    """Send other records, or none."""
    whole = ConfigRecord(parts)
    contents: list[dict[str, Any]] = [
        {},
        {"surprise": whole},
        {RECORD: MetricRecord({"loss": 1.0})},
        {RECORD: whole, "more": ConfigRecord({"a": 1})},
        {RECORD: whole, f"{RECORD}.1": ConfigRecord({"numbers": b""})},
        {RECORD: whole, f"{RECORD}.2": ConfigRecord({"numbers": b"1234"})},
        {RECORD: whole, f"{RECORD}.1": ConfigRecord({"numbers": b"1234"})},
        {RECORD: ConfigRecord()},
    ]
    return RecordDict(contents[random.integers(len(contents))])


def _retensor(parts: Parts, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a reply; one that has none gets one that is not asked for."""
    content = RecordDict({RECORD: ConfigRecord(parts)})
    tensors = {name: leaf.clone() for name, leaf in tensors_of(content).items()} or {"0": torch.zeros(3)}
    change(tensors)
    parts |= dict(pack(header_of(content), tensors)[RECORD])


DAMAGES: list[Callable[[Parts, Random], RecordDict | None]] = [
    *(flip_header, flip_list, cut_text, drop_key, change_value, drop_field, change_field, cut_numbers, not_finite),
    *(huge_numbers, odd_count, other_shape, other_tensors, deep_header, no_object, refuse, other_content),
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

        def postman(node: int, request: Message, deliver: Callable[[Message], Message]) -> list[Message]:
            nonlocal times
            if node != 1000 + self.offender or request.metadata.message_type != kind:
                return [deliver(request)]
            times += 1
            return damage(request, deliver(request))

        self.here.grid.postman = postman
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
            self.here.grid.postman = lambda node, request, deliver: [deliver(request)]
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
