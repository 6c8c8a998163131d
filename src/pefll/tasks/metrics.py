"""Metrics as sums over samples, so that batches and clients can be added."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.client import Batch

Array = npt.NDArray[np.float64]
BINS = 200  # of the histograms behind the AUC
CALIBRATION_BINS = 15


def mean(total: Array, samples: float) -> float:
    """Return the mean of values that were summed over samples, [] or [n], also over the n values of a sample."""
    return float(np.mean(total)) / samples


@dataclass(frozen=True)
class Metric:
    """A figure that is computed from sums over samples.

        within_ten = pefll.Metric("within_ten", lambda output, y: (output[:, 0] - y).abs() < 10)

    Attributes:
        name: its name in history, tables and summary.json.
        values: maps outputs [b, outputs] and labels, [b] or [b, k], to what is summed, [b] or [b, n]. A regression
            gives outputs in the unit of the labels.
        figure: maps the sums [] or [n] over all samples, and the number of samples, to the figure; by default the mean,
            also over the n values of a sample.
        smaller_is_better: whether it is an error.
        bounds: smallest and largest of `values`; sums that such values cannot have are refused. None for no bounds.
            The mean of values from 0 to 1 is a share, which tables and figures show in per cent.
    """

    name: str
    values: Callable[[Tensor, Tensor], Tensor]
    figure: Callable[[Array, float], float] = mean
    smaller_is_better: bool = False
    bounds: tuple[float, float] | None = None

    @property
    def is_share(self) -> bool:
        """Whether it is the mean of values from 0 to 1, which is shown in per cent."""
        return self.bounds is not None and tuple(self.bounds) == (0, 1) and self.figure is mean


def summed(metric: Metric, output: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Return the sum [] or [n] of a metric's values over a batch; PefllError if they are not one row per sample."""
    try:
        values: Any = metric.values(output, y)
    except Exception as error:  # a user's code may raise anything
        error.add_note(f"{_NOTE}{metric.name!r}")
        raise
    if not isinstance(values, Tensor) or values.dim() not in (1, 2) or len(values) != len(output):
        found = list(values.shape) if isinstance(values, Tensor) else shown(values)
        raise PefllError(
            f"the metric {metric.name!r} returned {found} for {counted(len(output), 'sample')}; it must return a "
            "tensor with one number per sample, [b], or several, [b, n]; do not average over samples",
            code="PEFLL-S640",
        )
    return batch.sum(values.to(output.dtype))


_NOTE = "the metric "


def metric_behind(error: BaseException) -> str:
    """Return the metric whose `values` raised an error, as `"the metric 'm'"`; "" if no metric did."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)), "")


def check_metrics(metrics: Sequence[Any], taken: Sequence[str] = ()) -> None:
    """Raise PefllError if an object is not a `Metric`, or if a name is no identifier, or is used twice."""
    names = list(taken)
    for each in metrics:
        if not isinstance(each, Metric):
            raise PefllError(f"measured has {shown(each)}; each must be a pefll.Metric", code="PEFLL-S501")
        check_name(each.name)
        if each.bounds is not None and not _are_bounds(each.bounds):
            raise PefllError(
                f"the metric {each.name!r} has bounds {shown(each.bounds)}; give the smallest and the largest of its "
                "values, such as (0, 1)",
                code="PEFLL-S643",
            )
        if each.name in names:
            raise PefllError(f"there are two metrics with the name {each.name!r}; rename one", code="PEFLL-S503")
        names.append(each.name)


def _are_bounds(bounds: Any) -> bool:
    """Return whether an object is a pair of numbers, the smaller one first."""
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return False
    return all(isinstance(each, int | float) for each in bounds) and bool(bounds[0] <= bounds[1])


def check_name(name: Any) -> None:
    """Raise PefllError if a metric's name is no identifier, or is that of another figure in records."""
    fits = isinstance(name, str) and name.isidentifier() and not iskeyword(name) and not name.startswith("_")
    if not fits or name in RESERVED:
        raise PefllError(
            f"a metric has the name {shown(name)}; choose another of letters, digits and _, such as within_ten",
            "PEFLL-S502",
        )


# Names of figures that every task has, and of other entries of records.
RESERVED = ("per_client", "worst_tenth", "per_sample", "count", "index", "client", "name", "seen")


def _one_hot(y: Tensor, classes: int) -> Tensor:
    return y[:, None] == torch.arange(classes, device=y.device)


# Classification: outputs are scores [b, classes], labels are classes [b].


def macro_f1(classes: int) -> Metric:
    """Return the mean over classes of the F1 score, the harmonic mean of precision and recall.

    Classes that occur neither among labels nor among predictions are left out.
    """

    def values(output: Tensor, y: Tensor) -> Tensor:
        chosen, right = _one_hot(output.argmax(dim=1), classes), _one_hot(y, classes)
        return torch.cat([chosen & right, chosen, right], dim=1)

    def figure(total: Array, samples: float) -> float:
        del samples
        both, either = total[:classes], total[classes : 2 * classes] + total[2 * classes :]
        return _mean_f1(both, either)

    return Metric("macro_f1", values, figure, bounds=(0, 1))


def _mean_f1(both: Array, either: Array) -> float:
    there = either > 0
    return float((2 * both[there] / either[there]).mean()) if there.any() else math.nan


def calibration_error(classes: int) -> Metric:
    """Return the expected calibration error: the mean gap of confidence and accuracy, over 15 groups by confidence."""
    del classes

    def values(output: Tensor, y: Tensor) -> Tensor:
        confidence, chosen = output.softmax(dim=1).max(dim=1)
        group = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
        here = _one_hot(group, CALIBRATION_BINS).to(output.dtype)
        return torch.cat([here * confidence[:, None], here * (chosen == y).to(output.dtype)[:, None]], dim=1)

    def figure(total: Array, samples: float) -> float:
        return float(np.abs(total[:CALIBRATION_BINS] - total[CALIBRATION_BINS:]).sum()) / samples

    return Metric("calibration_error", values, figure, smaller_is_better=True, bounds=(0, 1))


def auc(classes: int) -> Metric:
    """Return the area under the ROC curve, each class against the others; the mean over classes with both kinds.

    It is computed from histograms with 200 bins of the log-odds. A pair of samples in the same bin counts as a half,
    so the error is at most half the share of such pairs.
    """

    def values(output: Tensor, y: Tensor) -> Tensor:
        others = output[:, None, :].masked_fill(torch.eye(classes, dtype=torch.bool, device=y.device), -torch.inf)
        return _histograms(output - others.logsumexp(dim=2), _one_hot(y, classes))

    return Metric("auc", values, lambda total, samples: _mean_auc(total, classes), bounds=(0, 1))


def _histograms(odds: Tensor, positive: Tensor) -> Tensor:
    """Return in which bin each of the log-odds [b, k] is, for positives and for negatives, [b, k * 2 * BINS]."""
    # A quarter of the log-odds keeps confident predictions apart.
    place = ((odds / 4).sigmoid() * BINS).long().clamp(max=BINS - 1)
    here = place[..., None] == torch.arange(BINS, device=odds.device)
    return torch.cat([here & positive[..., None], here & ~positive[..., None]], dim=2).flatten(1)


def _mean_auc(total: Array, columns: int) -> float:
    found = []
    for positive, negative in total.reshape(columns, 2, BINS):
        pairs = positive.sum() * negative.sum()
        if pairs:
            below = np.cumsum(negative) - negative
            found.append(float((positive * (below + negative / 2)).sum() / pairs))
    return float(np.mean(found)) if found else math.nan


# Sets: outputs are the log-odds [b, k] of each member, labels are 0 or 1, [b, k].


def _set_counts(output: Tensor, y: Tensor, threshold: float) -> Tensor:
    chosen, right = output.sigmoid() > threshold, y > 0
    return torch.cat([chosen & right, chosen, right], dim=1)


def set_micro_f1(columns: int, threshold: float) -> Metric:
    """Return the F1 score of all decisions together."""

    def figure(total: Array, samples: float) -> float:
        del samples
        both, either = total[:columns].sum(), total[columns:].sum()
        return float(2 * both / either) if either else math.nan

    return Metric("micro_f1", lambda output, y: _set_counts(output, y, threshold), figure, bounds=(0, 1))


def set_macro_f1(columns: int, threshold: float) -> Metric:
    """Return the mean of the F1 scores of the members that occur among labels or predictions."""

    def figure(total: Array, samples: float) -> float:
        del samples
        return _mean_f1(total[:columns], total[columns : 2 * columns] + total[2 * columns :])

    return Metric("macro_f1", lambda output, y: _set_counts(output, y, threshold), figure, bounds=(0, 1))


def set_accuracy(columns: int, threshold: float) -> Metric:
    """Return the share of right decisions: whether a member is in a set."""
    del columns

    def values(output: Tensor, y: Tensor) -> Tensor:
        return ((output.sigmoid() > threshold) == (y > 0)).to(output.dtype).mean(dim=1)

    return Metric("accuracy", values, bounds=(0, 1))


def set_auc(columns: int, threshold: float) -> Metric:
    """Return the mean over members of the area under the ROC curve; see `auc`."""
    del threshold
    return Metric(
        "auc",
        lambda output, y: _histograms(output, y > 0),
        lambda total, samples: _mean_auc(total, columns),
        bounds=(0, 1),
    )


# Regression: outputs [b, k] and labels, [b] or [b, k], are numbers in the same unit.


def mae(output: Tensor, y: Tensor) -> Tensor:
    """Return the absolute errors, averaged over columns, [b]."""
    return (output - y.reshape(len(y), -1)).abs().mean(dim=1)


def squares(output: Tensor, y: Tensor) -> Tensor:
    """Return the squared errors, averaged over columns, [b]."""
    return (output - y.reshape(len(y), -1)).square().mean(dim=1)


def of_r2(output: Tensor, y: Tensor) -> Tensor:
    """Return squared errors, labels and squared labels, [b, 3k]."""
    return torch.cat([(output - y).square(), y, y.square()], dim=1)


def r2(total: Array, samples: float) -> float:
    """Return R², 1 minus the share of the labels' variance that is left; the mean over columns with variance."""
    left, label, squared = np.split(total, 3)
    variance = squared - label**2 / samples
    there = variance > 1e-6 * squared
    return float((1 - left[there] / variance[there]).mean()) if there.any() else math.nan


def rmse(total: Array, samples: float) -> float:
    """Return the square root of the mean squared error."""
    return float(np.sqrt(np.maximum(total, 0.0) / samples))  # NaN stays NaN, unlike with Python's max
