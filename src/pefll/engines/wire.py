"""Trees of tensors as bytes: JSON for the structure, safetensors for the numbers. Reading executes no code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import safetensors.torch
from torch import Tensor

from pefll.core.tree import Tree, leaves


def pack(*trees: Tree, **header: Any) -> bytes:
    """Return trees and a JSON-able header as bytes."""
    tensors = {
        str(place): leaf.contiguous() for place, leaf in enumerate(leaf for tree in trees for leaf in leaves(tree))
    }
    head = json.dumps({"header": header, "trees": [structure_of(tree) for tree in trees]}).encode()
    return len(head).to_bytes(4, "little") + head + safetensors.torch.save(tensors)


def unpack(message: bytes) -> tuple[dict[str, Any], list[Tree]]:
    """Return the header and the trees of a message made by `pack`."""
    size = int.from_bytes(message[:4], "little")
    head = json.loads(message[4 : 4 + size])
    tensors = safetensors.torch.load(message[4 + size :])
    # Cloned, because sums at unaligned addresses use other SIMD code, which rounds differently.
    values = iter(tensors[str(place)].clone() for place in range(len(tensors)))
    return head["header"], [build(structure, values) for structure in head["trees"]]


def structure_of(tree: Tree) -> Any:
    """Return the types of a tree without its tensors, as values that JSON can write."""
    if isinstance(tree, Tensor):
        return None
    return [type(tree).__module__, type(tree).__qualname__, [structure_of(part) for part in tree]]


def build(structure: Any, values: Iterator[Tensor]) -> Tree:
    """Return a tree of the given structure with the next tensors of `values`."""
    if structure is None:
        return next(values)
    module, name, parts = structure
    kind = getattr(sys.modules.get(module), name, None)
    # Only types of loaded modules are accepted, so a message cannot make this process import code.
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"{module}.{name} is not a message type")
    return kind(*(build(part, values) for part in parts))
