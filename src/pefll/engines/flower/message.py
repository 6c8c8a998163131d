"""What crosses: a header of small facts and named tensors, as one Flower record; checked before anything is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.errors import PefllError

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'") from None

FORMAT = 1
RECORD, TENSORS = "pefll", "tensors"
# Plain numbers in the order of memory. Flower's own way would write a file header around them, which has to be parsed.
RAW = "pefll.raw"
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_BYTES = 1 << 16  # the longest header that is read


class BadMessage(PefllError):
    """A message that is not what it should be; the text says how, as the end of a sentence about its sender."""


def encode(leaf: Tensor) -> Array:
    """Return a tensor as Flower carries it."""
    plain = leaf.detach().cpu().contiguous()
    return Array(_NAMES[plain.dtype], tuple(plain.shape), RAW, plain.numpy().tobytes())


def decode(array: Array) -> Tensor:
    """Return the tensor in a Flower array.

    Raises:
        BadMessage: where it is of another type than it says, or of one that never crosses.
    """
    dtype = DTYPES.get(array.dtype)
    if dtype is None or array.stype != RAW:
        raise BadMessage(f"sent {array.dtype} numbers written as {array.stype}, which are never asked for")
    shape = tuple(int(size) for size in array.shape)
    if min(shape, default=1) < 0 or len(array.data) != prod(shape) * dtype.itemsize:
        raise BadMessage(f"sent {len(array.data):,} bytes as a tensor of shape {list(shape)}")
    # Copied into memory of torch's own: numbers at odd addresses would be rounded differently on a CPU.
    leaf = torch.empty(shape, dtype=dtype)
    leaf.numpy()[...] = np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(shape)
    return leaf


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RecordDict:
    """Return the content of a Flower message."""
    return RecordDict(
        {
            RECORD: ConfigRecord({"format": FORMAT, "header": json.dumps(header, sort_keys=True)}),
            TENSORS: ArrayRecord({name: encode(leaf) for name, leaf in tensors.items()}),
        }
    )


def header_of(content: RecordDict) -> dict[str, Any]:
    """Return the header of a message's content; BadMessage where it has none that can be read."""
    if set(content) != {RECORD, TENSORS}:
        raise BadMessage("sent something that is no message of pefll")
    record = content[RECORD]
    if record.get("format") != FORMAT or set(record) != {"format", "header"}:
        raise BadMessage(f"speaks format {record.get('format')} and not {FORMAT}: is its pefll of the same version?")
    text = record["header"]
    if not isinstance(text, str) or len(text) > HEADER_BYTES:
        raise BadMessage("sent a header that is too long")
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise BadMessage("sent a header that cannot be read")
    return header


def tensors_of(content: RecordDict) -> dict[str, Tensor]:
    """Return the tensors of a message's content by name."""
    return {name: decode(array) for name, array in content[TENSORS].items()}


def all_finite(leaf: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    # A sum is much faster than looking at each number; where it is not finite, it may have been too large only.
    return not leaf.is_floating_point() or isfinite(leaf.sum().item()) or bool(torch.isfinite(leaf).all())


def bytes_of(content: RecordDict) -> int:
    """Return how many bytes of numbers and header a message carries, without looking into them."""
    total = 0
    for record in content.values():
        for value in record.values():
            data = getattr(value, "data", value)
            total += len(data) if isinstance(data, bytes | str) else 8
    return total
