"""The sums of a task as rows of numbers, so that engines and records can carry the sums of any task."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.arguments import shown
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault
from pefll.core.tree import map_tree
from pefll.data.client import Batch
from pefll.tasks.contract import Task

Floats = npt.NDArray[np.float64]


def no_sums(task: Task, y: Tensor, classes: int, dtype: torch.dtype) -> Any:
    """Return the sums over no samples: zeros, in the NamedTuple and the shapes that the task's `measure` returns.

    Args:
        task: the task.
        y: labels; only their shape, type and device matter.
        classes: number of classes; 0 without classes.
        dtype: type of the sums.
    """
    return map_tree(torch.zeros_like, _measured(task, y, classes, dtype))


def _measured(task: Task, y: Tensor, classes: int, dtype: torch.dtype) -> Any:
    """Return what the task's `measure` returns for a batch of one sample without weight."""
    one = y.new_zeros((1, *y.shape[1:]))
    output = torch.zeros((1, task.outputs), dtype=dtype, device=y.device)
    batch = Batch(output, one, output.new_zeros(1))
    known = torch.ones(classes, dtype=torch.bool, device=y.device) if classes else None
    return task.measure(output, batch, known)


class Layout(NamedTuple):
    """How the sums of a task lie in a row of numbers.

    Attributes:
        kind: the NamedTuple type of the sums.
        shapes: shape of each sum.
    """

    kind: Any
    shapes: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """The length of a row."""
        return sum(prod(shape) for shape in self.shapes)

    def sums(self, row: Floats) -> Any:
        """Return the sums in a row [width], each as an array."""
        parts, start = [], 0
        for shape in self.shapes:
            end = start + prod(shape)
            parts.append(row[start:end].reshape(shape))
            start = end
        return self.kind(*parts)


def layout_of(task: Task, y: Tensor, classes: int) -> Layout:
    """Return the layout of a task's sums for labels like y; PefllError if the task's `measure` returns no sums."""
    name = type(task).__name__
    try:
        found = _measured(task, y[:0].cpu(), classes, torch.float32)
    except PefllError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise PefllError(
            f"measure of the task {name}, or a metric, failed for a sample: {fault(error) or first_line(error)}",
            code="PEFLL-S526",
        ) from error
    fields = getattr(found, "_fields", ())
    if not fields or fields[0] != "samples" or not all(isinstance(part, Tensor) and part.dim() < 2 for part in found):
        raise PefllError(
            f"measure of the task {name} returns {shown(found)}; it must return a NamedTuple of tensors [] or [n], of "
            "which the first is `samples`",
            code="PEFLL-S520",
        )
    return Layout(type(found), tuple(tuple(part.shape) for part in found))


def figures_of(task: Task, sums: Any) -> dict[str, float]:
    """Return a task's metrics of added sums, the one that chooses the best round first; PefllError without metrics."""
    name = type(task).__name__
    try:
        found: Any = task.metrics(sums)
        figures = {key: float(value) for key, value in found.items()} if isinstance(found, Mapping) else {}
    except Exception as error:  # a user's code may raise anything
        raise PefllError(
            f"metrics of the task {name}, or the figure of a metric, failed: {fault(error) or first_line(error)}; "
            "return NaN for what is not defined",
            code="PEFLL-S527",
        ) from error
    if not figures:
        raise PefllError(
            f"metrics of the task {name} returned {shown(found)}; it must return a dict of names and numbers, of which "
            "the first one chooses the best round, such as {'loss': sums.loss / sums.samples}",
            code="PEFLL-S528",
        )
    return figures


def rows_of(sums: Any) -> Tensor:
    """Return the sums of clients, a NamedTuple of [c, ...], as rows float64 [c, width]."""
    return torch.cat([part.double().reshape(len(part), -1) for part in sums], dim=1)


def shares_of(task: Any) -> tuple[str, ...]:
    """Return the names of the user's metrics that are shown in per cent; a task without `BaseTask` may name none."""
    return tuple(getattr(task, "shares", ()))
