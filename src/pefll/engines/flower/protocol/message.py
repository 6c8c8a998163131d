"""The message format: a header and named tensors in one Flower record. Readers check all of it before they use it.

Flower sends each object of a message in a separate request. Records, arrays and chunks of arrays are all objects. So
one record has the header and all numbers. A message then has as few objects as Flower allows: the message, its content,
and this record.

The record of format 3, on every machine:

    format     3; a reader looks at it first, so every later format must have it too
    version    version of the sender's pefll, as text; server and clients must have the same
    header     a JSON object in ASCII; a client's header has its "name", which every later format must have too
    tensors    JSON in ASCII: [[name, type, shape], ...]; types are <f4, <f8, <i8 and |b1, where < is the byte order
    numbers    the values of one tensor after another, in C order, little-endian, no gaps; booleans are bytes 0 and 1

If the numbers need more than one piece, each further piece is a record that has only `numbers`. Any change of this is a
new format: increase FORMAT, and change the bytes in tests/engines/flower/test_format.py.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.files import is_nested_deeper, parse_json
from pefll.core.wording import counted
from pefll.engines.flower.protocol.environment import piece_bytes
from pefll.version import __version__

# Flower cuts arrays into chunks of this size, but does not cut our records. So we cut them: else a large model would be
# one huge request. This line is above the import of Flower, which fails with an invalid environment.
PIECE_BYTES = piece_bytes()

try:
    from flwr.app import ConfigRecord, RecordDict
except ImportError:
    raise PefllError("real clients need Flower: pip install flwr==1.41.0", code="PEFLL-F401") from None

FORMAT = 3
# Name of the record of every message. Records with further pieces are called RECORD.1, RECORD.2, ...
RECORD = "pefll"
# Types of numbers in a message, by NumPy's names of the types.
DTYPES = {"<f4": torch.float32, "<f8": torch.float64, "<i8": torch.int64, "|b1": torch.bool}
_WRITTEN = {dtype: name for name, dtype in DTYPES.items()}
_KEYS = {"format", "version", "header", "tensors", "numbers"}
# Limits of a message. A writer never exceeds them, and a reader checks them before it parses anything.
HEADER_BYTES = 1 << 16  # bytes of the header, and of the list of tensors
MOST_TENSORS = 1024
MOST_PIECES = 4096  # 20 GB of numbers, with pieces of Flower's default size
_AXES = 8  # axes of a tensor
_NESTING = 32  # depth of lists and objects inside one another
_OTHER = {"server": "client", "client": "server"}

with warnings.catch_warnings():
    # torch warns once per process when a tensor uses read-only memory. Cause that warning here, where it is ignored:
    # nobody writes to the tensors of `tensors_of`.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"0", dtype=np.uint8))


class BadMessage(PefllError):
    """Raised for an invalid message. The text says why. It is the end of a sentence that begins with the sender's name.

    The text may quote the sender. So long texts are cut, and unprintable characters are replaced: a log line stays one
    line, and a terminal gets no control characters.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence, 400))


def printable(text: str, most: int) -> str:
    """Return the first `most` characters of another machine's text, safe for a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def write_numbers(tensors: Mapping[str, Tensor]) -> tuple[str, bytes]:
    """Return the fields `tensors` and `numbers` of a message; PefllError if the tensors break a limit."""
    if len(tensors) > MOST_TENSORS:
        raise PefllError(
            f"a message can have at most {MOST_TENSORS:,} tensors, but {len(tensors):,} were given", code="PEFLL-F447"
        )
    listed: list[tuple[str, str, list[int]]] = []
    parts = []
    for name, leaf in tensors.items():
        kind = _WRITTEN.get(leaf.dtype)
        if kind is None or leaf.dim() > _AXES:
            raise PefllError(
                f"a message can have tensors of float32, float64, int64 or bool with up to {_AXES} axes, but one of "
                f"{str(leaf.dtype).removeprefix('torch.')} with {leaf.dim()} was given",
                code="PEFLL-F448",
            )
        listed.append((name, kind, list(leaf.shape)))
        plain = leaf.detach().cpu().contiguous().numpy()
        parts.append(plain.astype(kind, copy=False).reshape(-1).view(np.uint8).data)
    return _json_text(listed, "list of tensors"), b"".join(parts)


def _json_text(value: Any, what: str) -> str:
    """Return a value as JSON; PefllError if it is longer or more deeply nested than a reader accepts."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if len(text) > HEADER_BYTES:
        raise PefllError(
            f"the {what} of a message can have at most {HEADER_BYTES:,} bytes, but {len(text):,} were given",
            code="PEFLL-F449",
        )
    if is_nested_deeper(text, _NESTING):
        raise PefllError(
            f"the {what} of a message can have at most {_NESTING} lists inside one another, but more were given",
            code="PEFLL-F450",
        )
    return text


def read_numbers(text: Any, numbers: bytes) -> dict[str, Tensor]:
    """Return the tensors that `write_numbers` wrote; BadMessage if the list is invalid or does not match the numbers.

    The tensors share the memory of `numbers`: do not change them. Clone them before you compute with them if every bit
    matters: on a CPU, sums at unaligned addresses are rounded differently.
    """
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, kind, shape in _tensor_list(text):
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise BadMessage(f"sent numbers of type {kind:.20}, which no message has")
        count = prod(shape)
        ends = start + count * dtype.itemsize
        if ends > len(numbers):
            raise BadMessage(f"sent {len(numbers) - start:,} bytes as a tensor of shape {shape}")
        part, at = (numbers, start) if start % dtype.itemsize == 0 else (numbers[start:ends], 0)
        start = ends
        try:
            tensors[name] = _shaped(part, at, count, kind, shape)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            raise BadMessage(f"sent a tensor of shape {shape}, which is impossible") from None
    if start != len(numbers):
        raise BadMessage(f"sent {len(numbers):,} bytes of numbers, but its list says {start:,}")
    return tensors


def _shaped(numbers: bytes, start: int, count: int, kind: str, shape: list[int]) -> Tensor:
    if not count:
        return torch.empty(shape, dtype=DTYPES[kind])
    if DTYPES[kind] is torch.bool:  # torch allows the bytes 0 and 1 only
        return torch.from_numpy(np.frombuffer(numbers, np.uint8, count, start) != 0).view(shape)
    flat = np.frombuffer(numbers, kind, count, start)
    return torch.from_numpy(flat.astype(flat.dtype.newbyteorder("="), copy=False)).view(shape)


def _tensor_list(text: Any) -> list[list[Any]]:
    """Return a message's list of tensors. This checks the list's structure, but not whether the numbers match it."""
    listed = _parse(text, "list of tensors")
    if isinstance(listed, list) and len(listed) > MOST_TENSORS:
        raise BadMessage(f"sent {len(listed):,} tensors, but at most {MOST_TENSORS:,} are allowed")
    names = set()
    for entry in listed if isinstance(listed, list) else [None]:
        match entry:
            case [str(name), str(), list(shape)] if name not in names and len(shape) <= _AXES:
                if all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
                    names.add(name)
                    continue
        raise BadMessage("sent a list of tensors that cannot be read")
    return listed  # type: ignore[no-any-return]


def _parse(text: Any, what: str) -> Any:
    if not isinstance(text, str) or len(text) > HEADER_BYTES:
        raise BadMessage(f"sent a {what} that is too long")
    if is_nested_deeper(text, _NESTING):
        raise BadMessage(f"sent a {what} with more than {_NESTING} lists inside one another")
    try:
        return parse_json(text)
    except ValueError:
        raise BadMessage(f"sent a {what} that cannot be read") from None


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RecordDict:
    """Return the content of a Flower message; PefllError if it breaks a limit."""
    listed, numbers = write_numbers(tensors)
    if len(numbers) > MOST_PIECES * PIECE_BYTES:
        raise PefllError(
            f"a message can have at most {MOST_PIECES * PIECE_BYTES:,} bytes of numbers, but {len(numbers):,} were "
            f"given; increase FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, now {PIECE_BYTES:,}, the size of its {MOST_PIECES:,} "
            "pieces",
            code="PEFLL-F451",
        )
    first = numbers if len(numbers) <= PIECE_BYTES else numbers[:PIECE_BYTES]
    head = {"format": FORMAT, "version": __version__, "header": _json_text(header, "header"), "tensors": listed}
    records = {RECORD: ConfigRecord(head | {"numbers": first})}
    for start in range(PIECE_BYTES, len(numbers), PIECE_BYTES):
        records[_piece(len(records))] = ConfigRecord({"numbers": numbers[start : start + PIECE_BYTES]})
    return RecordDict(records)


def header_of(content: RecordDict, here: str = "server") -> dict[str, Any]:
    """Return the header of a message's content; BadMessage if it is invalid. `here` is the reader: server or client."""
    record = content.get(RECORD)
    if not isinstance(record, ConfigRecord) or "format" not in record:
        raise BadMessage("sent something that is not a pefll message")
    _check_format(record["format"], here)  # first, because other formats may have other keys
    if len(content) > MOST_PIECES:
        raise BadMessage(f"sent {counted(len(content), 'piece')} of numbers, but at most {MOST_PIECES:,} are allowed")
    pieces = {_piece(place) for place in range(1, len(content))}
    if (
        set(record) != _KEYS
        or set(content) != {RECORD, *pieces}
        or any(set(content[name]) != {"numbers"} for name in pieces)
        or not all(isinstance(part["numbers"], bytes) for part in content.values())
        or not all(content[name]["numbers"] for name in pieces)
    ):
        raise BadMessage("sent something that is not a pefll message")
    if record["version"] != __version__:
        raise BadMessage(
            f"has pefll {record['version']!s:.20}, but this {here} has {__version__}: install the same on both"
        )
    header = _parse(record["header"], "header")
    if not isinstance(header, dict):
        raise BadMessage("sent a header that cannot be read")
    return header


def _check_format(spoken: Any, here: str) -> None:
    """Raise BadMessage for another format. The text says whether the server or the client has the older pefll."""
    if type(spoken) is not int:
        raise BadMessage(f"uses an unknown format, but this {here} uses format {FORMAT}: check its version of pefll")
    if spoken != FORMAT:
        older = _OTHER[here] if spoken < FORMAT else here
        raise BadMessage(f"uses format {spoken}, but this {here} uses {FORMAT}: upgrade pefll on the {older}'s machine")


def sender_of(content: RecordDict) -> str:
    """Return the name that a message of any format gives its sender; "" if it cannot be read."""
    record = content.get(RECORD)
    try:
        header = _parse(record["header"], "header") if isinstance(record, ConfigRecord) else None
    except (BadMessage, KeyError):
        return ""
    name = header.get("name") if isinstance(header, dict) else None
    return printable(name, 80) if isinstance(name, str) else ""


def tensors_of(content: RecordDict) -> dict[str, Tensor]:
    """Return the tensors of a message's content by name, read-only (see `read_numbers`); call `header_of` first."""
    numbers = content[RECORD]["numbers"]
    if len(content) > 1:
        numbers = b"".join([numbers, *(content[_piece(place)]["numbers"] for place in range(1, len(content)))])
    return read_numbers(content[RECORD]["tensors"], numbers)


def _piece(place: int) -> str:
    return f"{RECORD}.{place}"


def all_finite(leaf: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    # A sum is much faster than a check of each number. But the sum of finite numbers may overflow, so check again then.
    return not leaf.is_floating_point() or isfinite(leaf.sum().item()) or bool(torch.isfinite(leaf).all())


def bytes_of(content: RecordDict) -> int:
    """Return the size of a message's content in bytes, without parsing it."""
    total = 0
    for place, record in content.items():
        total += len(place)
        for name, value in record.items():
            data = getattr(value, "data", value)
            total += len(name) + (len(data) if isinstance(data, bytes | str) else 8)
            total += 8 * len(data) if isinstance(data, list) else 0
    return total
