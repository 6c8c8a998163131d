"""Ways to damage a client's reply: each changes the parts of its record, or returns another content altogether."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from pefll.engines.flower.protocol.message import RECORD, header_of, pack, tensors_of

Random = np.random.Generator
Parts = dict[str, Any]  # of a message's one record: format, version, header, tensors, numbers
NONSENSE: list[Any] = [None, True, -1, 1.5, 1 << 70, "", "x" * 1000, [], [[]], {}, {"a": 1}, float("nan")]
FIELDS: list[Any] = [0, -1, 1.5, True, "", "nonsense", b"", b"\xff\xfe", [1, 2], ["a"], [b"a"], [0.5], 1 << 62]


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
