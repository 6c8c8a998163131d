"""Functions on trees. A tree is a tensor, or a NamedTuple of trees. States and messages are trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from pefll.core.reference import reference

Tree = Any


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `function` to each tensor of `tree` and its counterparts in `others`; return the tree of the results."""
    if isinstance(tree, tuple):
        return type(tree)(*(map_tree(function, *parts) for parts in zip(tree, *others, strict=True)))
    return function(tree, *others)


def leaves(tree: Tree, but: type | None = None) -> Iterator[Tensor]:
    """Yield the tensors of `tree` in a fixed order, but skip subtrees of type `but`."""
    if but is not None and isinstance(tree, but):
        return
    if isinstance(tree, tuple):
        for part in tree:
            yield from leaves(part, but)
    else:
        yield tree


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) for every tensor of `tree`."""
    if isinstance(tree, tuple):
        for name, part in zip(tree._fields, tree, strict=True):  # type: ignore[attr-defined]
            yield from named_leaves(part, f"{prefix}{name}.")
    else:
        yield prefix.rstrip(".") or "value", tree


def from_named(template: Tree, values: dict[str, Tensor]) -> Tree:
    """Return a tree like `template` with the tensors in `values`, whose keys are the names of `named_leaves`."""
    by_place = iter([values[name] for name, _ in named_leaves(template)])
    return map_tree(lambda _: next(by_place), template)


@reference
def rows_are_finite(rows: Tensor) -> Tensor:
    """Return which rows of [n, m] have only finite numbers, bool [n]."""
    return rows.isfinite().all(dim=1)
