"""The file format of personal models, embedders and generators: safetensors with a SHA-256 of itself in the header.

The hash is over the whole file, with zeros in place of the hash. It finds accidental damage. It does not stop an
attacker, who can compute it too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from pefll.core import tensorfile
from pefll.core.errors import PefllError, first_line
from pefll.core.files import parse_json
from pefll.data.table_plan import plan_of
from pefll.models.spec import ModelSpec

FORMAT = "pefll-personal-model-2"
UNCHECKED = "pefll-personal-model-1"  # format of earlier versions, without a hash
# Enough for any personal model: the names of a hundred thousand columns, and two billion weights.
MOST_HEADER, MOST_BYTES = 1 << 24, 1 << 33
DAMAGED = ("PEFLL-M010", "PEFLL-M012", "PEFLL-M013", "PEFLL-M017")  # codes of errors for damaged files
_LENGTH = 8  # bytes with the length of the header
_DIGITS = 64
_AXES = 8  # most axes of a tensor
# Only the metadata can match, because quotation marks inside texts are escaped.
_HASH = re.compile(rb'"sha256":"([0-9a-f]{64})"')


class Kind(NamedTuple):
    """What a file holds.

    Attributes:
        name: the kind in words, with an article.
        formats: formats of such files, the newest first.
        maker: what makes such a file.
        entries: texts in the header beside the spec.
    """

    name: str
    formats: tuple[str, ...]
    maker: str
    entries: tuple[str, ...] = ()


PERSONAL_MODEL = Kind("a personal model", (FORMAT, UNCHECKED), "`pefll personalize`")


class TensorSpec(NamedTuple):
    """The type of a tensor, as safetensors calls it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The header of a file, read before its weights.

    Attributes:
        spec: the spec of the model.
        tensors: types and shapes of the tensors, by name.
        checked: whether there is a hash to check; files of earlier versions have none.
        size: size of the whole file, in bytes.
        head: the first bytes of the file, to the end of the header.
        texts: the entries of `Kind.entries`, by name.
        kind: what the file holds.
    """

    spec: ModelSpec
    tensors: dict[str, TensorSpec]
    checked: bool
    size: int
    head: bytes
    texts: dict[str, str]
    kind: Kind


def damaged(path: Path, reason: str, code: str = "PEFLL-M010", kind: Kind = PERSONAL_MODEL) -> PefllError:
    """Return the error for a file that cannot be used."""
    return PefllError(f"{path} is damaged: {reason}; make it again with {kind.maker}", code)


def _no_such_file(path: Path, reason: str, kind: Kind) -> PefllError:
    return PefllError(
        f"{path} is not a safetensors file, or it is damaged: {reason}; make one with {kind.maker}",
        "PEFLL-M013",
    )


def _unreadable(path: Path, error: OSError) -> PefllError:
    return PefllError(f"{path} cannot be read: {error.strerror or error}", "PEFLL-M011")


def to_bytes(
    tensors: Mapping[str, Tensor], spec: str, texts: Mapping[str, str] | None = None, kind: Kind = PERSONAL_MODEL
) -> bytes:
    """Return the content of a file.

    Args:
        tensors: tensors by name.
        spec: the spec of the model, as JSON.
        texts: the entries of `Kind.entries`, by name.
        kind: what the file holds.
    """
    metadata = {"format": kind.formats[0], "facts": spec, **(texts or {}), "sha256": "0" * _DIGITS}
    digest = hashlib.sha256()
    for part in tensorfile.parts(tensors, metadata):
        digest.update(part)
    return b"".join(tensorfile.parts(tensors, metadata | {"sha256": digest.hexdigest()}))


def may_be(head: bytes) -> bool:
    """Return whether the first bytes of a file are like those of a safetensors file: a length, then JSON."""
    return head[_LENGTH : _LENGTH + 1] == b"{" and 2 <= int.from_bytes(head[:_LENGTH], "little") <= MOST_HEADER


def read_header(path: Path, kind: Kind = PERSONAL_MODEL) -> Header:
    """Return the header of a file; PefllError if it makes no sense, or if the file is of another kind.

    Nothing else is read, so a file that claims to be huge costs nothing.
    """
    try:
        with path.open("rb") as file:
            return _header(file, os.fstat(file.fileno()).st_size, path, kind)
    except OSError as error:
        raise _unreadable(path, error) from error


def read_tensors(path: Path, header: Header) -> dict[str, Tensor]:
    """Return the tensors of a file by name; PefllError if its hash is wrong, or it changed after `read_header`."""
    try:
        with path.open("rb") as file:
            content = file.read(header.size + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) != header.size or not content.startswith(header.head):
        raise damaged(path, "it changed while it was read", kind=header.kind)
    if header.checked and not _hash_is_right(content):
        raise damaged(path, "its SHA-256 is wrong", "PEFLL-M012", header.kind)
    try:
        return tensorfile.read(content)
    except ValueError as error:
        raise damaged(path, "its tensors cannot be read", kind=header.kind) from error


def _header(file: BinaryIO, size: int, path: Path, kind: Kind) -> Header:
    if size > MOST_BYTES:
        raise damaged(path, f"it has {size:,} bytes, but {kind.name} has at most {MOST_BYTES:,}", kind=kind)
    start = file.read(_LENGTH)
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH or not 2 <= length <= min(MOST_HEADER, size - _LENGTH):
        raise _no_such_file(path, "it does not begin like one", kind)
    text = file.read(length)
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique)
        metadata = content.pop("__metadata__", {})
        tensors = _tensor_specs(content, size - _LENGTH - length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _no_such_file(path, "its header makes no sense", kind) from error
    if not isinstance(metadata, dict) or metadata.get("format") not in kind.formats:
        raise PefllError(f"{path} is not {kind.name}; make one with {kind.maker}", "PEFLL-M014")
    checked = metadata["format"] != UNCHECKED
    if set(metadata) != {"format", "facts", *kind.entries, *(["sha256"] if checked else [])}:
        raise damaged(path, "its header has other entries than it should", kind=kind)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "its header holds values that are not texts", kind=kind)
    try:
        spec = ModelSpec.from_json(parse_json(metadata["facts"].encode()))
        plan_of(spec.table, spec.input_shape)
    except ValueError as error:
        raise damaged(path, first_line(error), "PEFLL-M017", kind) from None
    texts = {name: metadata[name] for name in kind.entries}
    return Header(spec, tensors, checked, size, start + text, texts, kind)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dictionary; ValueError if a key is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _tensor_specs(content: dict[str, Any], size: int) -> dict[str, TensorSpec]:
    """Return the specs of tensors; ValueError unless they fill `size` bytes without gaps or overlaps."""
    end = 0
    found = {}
    for name, entry in sorted(content.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        shape, (begin, stop) = entry["shape"], entry["data_offsets"]
        if set(entry) != {"dtype", "shape", "data_offsets"} or not isinstance(shape, list) or len(shape) > _AXES:
            raise ValueError("an entry makes no sense")
        if not all(type(number) is int and 0 <= number <= MOST_BYTES for number in (*shape, begin, stop)):
            raise ValueError("an entry has a number that makes no sense")
        if begin != end or stop - begin != math.prod(shape) * tensorfile.SIZES[entry["dtype"]]:
            raise ValueError("a tensor is not where it should be")
        end, found[name] = stop, TensorSpec(entry["dtype"], tuple(shape))
    if end != size:
        raise ValueError("the file is too short or too long")
    return found


def _hash_is_right(content: bytes) -> bool:
    """Return whether the header has exactly one hash, and it is the hash of the content."""
    length = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    found = [match.start(1) for match in _HASH.finditer(content, 0, length)]
    if len(found) != 1:
        return False
    start, end = found[0], found[0] + _DIGITS
    digest = hashlib.sha256(content[:start] + b"0" * _DIGITS)
    digest.update(memoryview(content)[end:])
    return digest.hexdigest().encode() == content[start:end]
