"""The sums of a task as rows of numbers, so that engines and records can carry the sums of any task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from pefll.core.wording import first_few
from pefll.data.client import Batch
from pefll.tasks.contract import Task
from pefll.tasks.metrics import metric_behind

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


def _measured(task: Task, y: Tensor, classes: int, dtype: torch.dtype, samples: int = 1) -> Any:
    """Return what the task's `measure` returns for a batch of samples without weight."""
    labels = y.new_zeros((samples, *y.shape[1:]))
    output = torch.zeros((samples, task.outputs), dtype=dtype, device=y.device)
    batch = Batch(output, labels, output.new_zeros(samples))
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


@contextmanager
def explained_sums(task: Task) -> Iterator[None]:
    """Raise PefllError if a task's `measure` fails in the `with` block."""
    try:
        yield
    except PefllError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise PefllError(
            f"{metric_behind(error) or 'measure'} of the task {type(task).__name__} failed for a batch: "
            f"{fault(error) or first_line(error)}",
            code="PEFLL-S526",
        ) from error


def layout_of(task: Task, y: Tensor, classes: int) -> Layout:
    """Return the layout of a task's sums for labels like y; PefllError if the task's `measure` returns no sums."""
    with explained_sums(task):
        found = _measured(task, y[:0].cpu(), classes, torch.float32)
    fields = getattr(found, "_fields", ())
    if not fields or fields[0] != "samples" or not all(isinstance(part, Tensor) and part.dim() < 2 for part in found):
        raise PefllError(
            f"measure of the task {type(task).__name__} returns {shown(found)}; it must return a NamedTuple of tensors "
            "[] or [n], of which the first is `samples`",
            code="PEFLL-S520",
        )
    return Layout(type(found), tuple(tuple(part.shape) for part in found))


def check_widths(task: Task, y: Tensor, classes: int) -> None:
    """Raise PefllError if the shape of a task's sums depends on the number of samples of a batch.

    A metric that compares each sample with all others returns [b, b], whose sums [b] cannot be added.
    """
    few, more = _BATCHES
    with explained_sums(task):
        one, other = (_measured(task, y[:0].cpu(), classes, torch.float32, samples) for samples in _BATCHES)
    for name, mine, its in zip(one._fields, one, other, strict=True):
        if mine.shape != its.shape:
            found = f"[{few}, {mine.numel()}] for {few} samples, but [{more}, {its.numel()}] for {more}"
            raise PefllError(
                f"the metric {name!r} of the task {type(task).__name__} returned {found}; it must return [b], or "
                "[b, n] with the same n for every b, so give output[:, 0] and y the same shape",
                code="PEFLL-S641",
            )


_BATCHES = (3, 5)  # numbers of samples


def figures_of(task: Task, sums: Any) -> dict[str, float]:
    """Return a task's metrics of added sums, the one that chooses the best round first; PefllError without metrics.

    A metric that is infinite is not defined, as if it were NaN: records hold finite numbers.
    """
    return {name: value if math.isfinite(value) else math.nan for name, value in given_figures(task, sums).items()}


def check_same_names(task: Task, figures: Mapping[str, float], names: tuple[str, ...]) -> None:
    """Raise PefllError if a task's metrics have other names, or another order, than for other sums."""
    if tuple(figures) != names:
        raise PefllError(
            f"metrics of the task {type(task).__name__} returned the names {first_few(figures)} for some samples, and "
            f"{first_few(names)} for others; return the same names always, with NaN for what is not defined",
            code="PEFLL-S667",
        )


def given_figures(task: Task, sums: Any) -> dict[str, float]:
    """Return the metrics that a task gives for added sums, also infinite ones; see `figures_of`."""
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


def metric_not_finite(layout: Layout, row: Floats, where: str) -> PefllError:
    """Return the error that names the first sum in a row [width] that is not finite, such as that of a metric."""
    sums = layout.sums(row)
    bad = next(name for name, part in zip(sums._fields, sums, strict=True) if not np.isfinite(part).all())
    return PefllError(
        f"the metric {bad!r} is NaN or infinite for {where}; let it give a finite number for every sample, for "
        "example by a small constant in a denominator",
        code="PEFLL-T582",
    )


def check_bounds(task: Task, layout: Layout, rows: Floats, where: Callable[[int], str]) -> None:
    """Raise PefllError if a sum in rows [c, width] is outside of what a metric's `bounds` allow for so many samples.

    Args:
        task: the task; `Task.bounds` says what one sample can add to a sum.
        layout: how its sums lie in a row; the first one is the number of samples.
        rows: [c, width] sums.
        where: says whose sums a row has, for the sentence.
    """
    bounds, samples, start = task.bounds(), rows[:, :1], 0
    means = np.divide(rows, samples, out=np.zeros_like(rows), where=samples > 0)
    for name, shape in zip(layout.kind._fields, layout.shapes, strict=True):
        found = means[:, start : start + prod(shape)]
        start += prod(shape)
        if name not in bounds or not found.size:
            continue
        least, most = bounds[name]
        slack = 1e-3 * max([1.0, *(abs(bound) for bound in (least, most) if math.isfinite(bound))])  # sums are rounded
        outside = np.where(samples > 0, np.maximum(least - slack - found, found - most - slack), -math.inf)
        if outside.max() > 0:
            row, place = np.unravel_index(int(outside.argmax()), outside.shape)
            many = samples[row, 0] > 1
            raise PefllError(
                f"the metric {name!r} of the task {type(task).__name__} is {found[row, place]:.6g} "
                f"{'on average ' if many else ''}for {where(int(row))}, but its bounds are ({least:g}, {most:g}); "
                "correct its values or its bounds",
                code="PEFLL-S642",
            )
