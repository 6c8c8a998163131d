"""vmap rules for operations with a client axis: they merge the mapped axis into the client axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from pefll.core.errors import PefllError


def merge_mapped_axis(
    operation: Any, shared: frozenset[int] = frozenset(), written: frozenset[int] = frozenset()
) -> None:
    """Register the vmap rule of an operation. The first axis of its tensors is the client axis.

    Args:
        operation: its arguments are tensors, lists of tensors, and numbers.
        shared: positions of arguments without a client axis.
        written: positions of arguments that the operation overwrites. Such an operation returns nothing.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def merge(place: int, value: Any, dim: Any) -> Any:
            if isinstance(value, list):
                return [merge(place, part, of_part) for part, of_part in zip(value, dim, strict=True)]
            if not isinstance(value, Tensor):
                return value
            if place in shared:
                if dim is not None:
                    raise PefllError(
                        "samples are shared by all clients of a federation, so they cannot be mapped", code="PEFLL-E001"
                    )
                return value
            return merged_view(value, dim) if place in written else merged(value, dim, info.batch_size)

        whole = [merge(place, value, dim) for place, (value, dim) in enumerate(zip(args, in_dims, strict=True))]
        result = operation(*whole)
        if result is None:
            return None, None
        if isinstance(result, Tensor):
            return unmerged(result, info.batch_size), 0
        return tuple(unmerged(part, info.batch_size) for part in result), (0,) * len(result)

    operation.register_vmap(rule)


def merged(value: Tensor, dim: int | None, mapped: int) -> Tensor:
    """Return a value [c, ...] as [mapped * c, ...]. `dim` is its mapped axis; None if it is the same for all."""
    every = value.unsqueeze(0).expand(mapped, *value.shape) if dim is None else value.movedim(dim, 0)
    return every.flatten(0, 1)


def merged_view(value: Tensor, dim: int | None) -> Tensor:
    """Return the same as `merged`, but as a view: writing to the result changes the value."""
    if dim is None:
        raise PefllError("a tensor that all clients share cannot be overwritten for each client", code="PEFLL-E002")
    every = value.movedim(dim, 0)
    return every.view(-1, *every.shape[2:])  # where `flatten` would copy, `view` fails


def unmerged(value: Tensor, mapped: int) -> Tensor:
    """Return a value [mapped * c, ...] as [mapped, c, ...]."""
    parts: Tensor = value.unflatten(0, (mapped, -1))  # type: ignore[no-untyped-call]
    return parts


def mapped_over(value: Tensor) -> frozenset[int]:
    """Return the levels of all active `vmap`s that map a value, also those inside of gradient transforms."""
    levels = set()
    while functorch.is_functorch_wrapped_tensor(value):
        if functorch.is_batchedtensor(value):
            levels.add(functorch.maybe_get_level(value))
        value = functorch.get_unwrapped(value)
    return frozenset(levels)


def has_gradient(value: Tensor) -> bool:
    """Return whether autograd or an active transform differentiates with respect to a value."""
    while functorch.is_functorch_wrapped_tensor(value):
        if value.requires_grad:
            return True
        value = functorch.get_unwrapped(value)
    return value.requires_grad


def packed(x: Tensor) -> Tensor:
    """Return x [c, ...] with contiguous rows x[i]. Columns of parameter vectors [c, D] are not copied."""
    return x if x[0].is_contiguous() else x.contiguous()


def maybe_packed(x: Tensor | None) -> Tensor | None:
    """Return `packed(x)`, or None for None."""
    return None if x is None else packed(x)


def with_client_axis(x: Tensor | None) -> Tensor | None:
    """Return x [...] as [1, ...], or None for None."""
    return None if x is None else x.unsqueeze(0)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return the result of an autograd function."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


class NoSecondDerivative(torch.autograd.Function):
    """Base class of operations in the backward pass. Differentiating them raises PefllError."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise PefllError."""
        raise PefllError(
            "the CUDA kernels have no second derivatives; set PEFLL_KERNELS=0, or use the serial engine",
            code="PEFLL-E003",
        )
