"""The bytes of a personal model's file: a safetensors file with its own SHA-256 inside.

The hash is over the whole file with zeros in place of the hash's own digits, so that no byte can change unnoticed. It
tells damage, not malice: whoever writes a file can write its hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors
import safetensors.torch
from torch import Tensor

from pefll.core.errors import PefllError

FORMAT = "pefll-personal-model-2"
UNCHECKED = "pefll-personal-model-1"  # of earlier versions, without a hash
# More than any personal model has: the names of a hundred thousand columns, and two thousand million weights.
MOST_HEADER, MOST_BYTES = 1 << 24, 1 << 33
# Codes of errors that say that a file is damaged; others cannot be read, or are something else.
DAMAGED = ("PEFLL-M010", "PEFLL-M012", "PEFLL-M013")
_LENGTH = 8  # bytes with the length of the header
_DIGITS = 64
_AXES = 8  # of a tensor, at most
# No text inside of the header can hold this: there, quotation marks are escaped.
_HASH = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Spec(NamedTuple):
    """What a file says of one of its tensors: the type as safetensors calls it, and the shape."""

    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """What a file says of itself, before any of its weights is read.

    Attributes:
        facts: what the model takes and where it comes from, as JSON.
        specs: of its tensors, by name.
        checked: whether there is a hash to check; files of earlier versions have none.
        size: of the whole file, in bytes.
        head: the file's first bytes, to the end of the header.
    """

    facts: str
    specs: dict[str, Spec]
    checked: bool
    size: int
    head: bytes


def damaged(path: Path, reason: str, code: str = "PEFLL-M010") -> PefllError:
    """Return the error for a file that cannot be used.

    Args:
        path: of the file.
        reason: in a few words.
        code: of the error.
    """
    return PefllError(f"{path} is damaged: {reason}; make it again with `pefll personalize`", code)


def _no_such_file(path: Path, reason: str) -> PefllError:
    return PefllError(
        f"{path} is not a safetensors file, or it is damaged: {reason}; make one with `pefll personalize`",
        "PEFLL-M013",
    )


def to_bytes(tensors: dict[str, Tensor], facts: str) -> bytes:
    """Return a file's content.

    Args:
        tensors: by name.
        facts: as JSON.
    """
    content = safetensors.torch.save(tensors, {"format": FORMAT, "facts": facts, "sha256": "0" * _DIGITS})
    start = _place_of_hash(content)
    assert start is not None
    return content[:start] + hashlib.sha256(content).hexdigest().encode() + content[start + _DIGITS :]


def read_header(path: Path) -> Header:
    """Return what a file says of itself; PefllError where that makes no sense.

    Only the header is read, so that a file that asks for much costs nothing.
    """
    try:
        with path.open("rb") as file:
            return _header(file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise PefllError(f"{path} cannot be read: {error.strerror or error}", "PEFLL-M011") from error


def read_tensors(path: Path, header: Header) -> dict[str, Tensor]:
    """Return a file's tensors by name, after its hash is checked.

    Args:
        path: of the file.
        header: as it was read before; PefllError where the file has changed since.
    """
    try:
        with path.open("rb") as file:
            content = file.read(header.size + 1)
    except OSError as error:
        raise PefllError(f"{path} cannot be read: {error.strerror or error}", "PEFLL-M011") from error
    if len(content) != header.size or not content.startswith(header.head):
        raise damaged(path, "it changed while it was read")
    if header.checked and not _hash_is_right(content):
        raise damaged(path, "its content does not have the SHA-256 that it was written with", "PEFLL-M012")
    try:
        return dict(safetensors.torch.load(content))
    except (safetensors.SafetensorError, ValueError, TypeError, RuntimeError, KeyError) as error:
        raise damaged(path, "its tensors cannot be read") from error


def _header(file: BinaryIO, size: int, path: Path) -> Header:
    if size > MOST_BYTES:
        raise damaged(path, f"it has {size:,} bytes, and no personal model has more than {MOST_BYTES:,}")
    start = file.read(_LENGTH)
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH or not 2 <= length <= min(MOST_HEADER, size - _LENGTH):
        raise _no_such_file(path, "it does not begin as one")
    text = file.read(length)
    try:
        content = json.loads(text.decode(), object_pairs_hook=_without_doubles)
        metadata = content.pop("__metadata__", {})
        specs = _specs(content, size - _LENGTH - length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _no_such_file(path, "its header makes no sense") from error
    if not isinstance(metadata, dict) or metadata.get("format") not in (FORMAT, UNCHECKED):
        raise PefllError(f"{path} is not a personal model; make one with `pefll personalize`", "PEFLL-M014")
    checked = metadata["format"] == FORMAT
    if set(metadata) != {"format", "facts", *(["sha256"] if checked else [])}:
        raise damaged(path, "its header has other entries than it should")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "its header holds other things than texts")
    return Header(metadata["facts"], specs, checked, size, start + text)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _specs(content: dict[str, Any], size: int) -> dict[str, Spec]:
    """Return the specs of tensors that lie one after the other and fill `size` bytes; ValueError where they do not."""
    end = 0
    found = {}
    for name, entry in sorted(content.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        shape, (begin, stop) = entry["shape"], entry["data_offsets"]
        if set(entry) != {"dtype", "shape", "data_offsets"} or not isinstance(shape, list) or len(shape) > _AXES:
            raise ValueError("an entry makes no sense")
        if not all(type(number) is int and 0 <= number <= MOST_BYTES for number in (*shape, begin, stop)):
            raise ValueError("an entry has a number that makes no sense")
        if begin != end or stop - begin != math.prod(shape) * _BYTES[entry["dtype"]]:
            raise ValueError("a tensor is not where it should be")
        end, found[name] = stop, Spec(entry["dtype"], tuple(shape))
    if end != size:
        raise ValueError("the file is too short or too long")
    return found


def _place_of_hash(content: bytes) -> int | None:
    """Return where the digits of the hash begin in a file; None where there is not exactly one hash in its header."""
    length = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    found = [match.start(1) for match in _HASH.finditer(content, 0, length)]
    return found[0] if len(found) == 1 else None


def _hash_is_right(content: bytes) -> bool:
    start = _place_of_hash(content)
    if start is None:
        return False
    digest = hashlib.sha256(content[:start])
    digest.update(b"0" * _DIGITS)
    digest.update(memoryview(content)[start + _DIGITS :])
    return digest.hexdigest().encode() == content[start : start + _DIGITS]
