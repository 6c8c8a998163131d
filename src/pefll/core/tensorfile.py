"""Reads and writes safetensors files. It writes in parts, so that memory never holds a second copy of all tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pefll.core.errors import PefllError

# Names of types in safetensors files.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}
SIZES = {name: dtype.itemsize for dtype, name in TYPES.items()}


def parts(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the parts of a safetensors file: the length of its header, the header, each tensor.

    The safetensors library itself would first copy all tensors and block other threads meanwhile.
    """
    # Larger types first, so that each tensor starts at a multiple of its type's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in TYPES:
            raise PefllError(
                f"a safetensors file cannot hold {name}, a tensor of {tensor.dtype}; convert it to another type",
                code="PEFLL-R101",
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name in order:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name; ValueError if it is damaged."""
    try:
        return dict(safetensors.torch.load(content))
    except (safetensors.SafetensorError, TypeError, RuntimeError, KeyError) as error:
        raise ValueError(str(error)) from error
