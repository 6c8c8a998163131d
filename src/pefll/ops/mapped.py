"""How an operation with a client axis is mapped: `vmap`'s axis becomes its client axis."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pefll.errors import PefllError


def merge_mapped_axis(operation: Any, shared: frozenset[int] = frozenset()) -> None:
    """Register the vmap rule of an operation whose tensors (all but the `shared`) have the client axis first."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def merge(place: int, value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            if place in shared:
                if dim is not None:
                    raise PefllError("samples are shared by all clients of a federation, so they cannot be mapped")
                return value
            return merged(value, dim, info.batch_size)

        whole = [merge(place, value, dim) for place, (value, dim) in enumerate(zip(args, in_dims, strict=True))]
        result = operation(*whole)
        if isinstance(result, Tensor):
            return parted(result, info.batch_size), 0
        return tuple(parted(part, info.batch_size) for part in result), (0,) * len(result)

    operation.register_vmap(rule)


def merged(value: Tensor, dim: int | None, mapped: int) -> Tensor:
    """Return a value [c, ...] that is mapped over `dim`, or is the same for all, as [mapped * c, ...]."""
    every = value.unsqueeze(0).expand(mapped, *value.shape) if dim is None else value.movedim(dim, 0)
    return every.flatten(0, 1)


def parted(value: Tensor, mapped: int) -> Tensor:
    """Return a value [mapped * c, ...] as [mapped, c, ...]."""
    parts: Tensor = value.unflatten(0, (mapped, -1))  # type: ignore[no-untyped-call]
    return parts
