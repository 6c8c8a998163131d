"""Regression: each sample has one or several numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pefll.core.errors import PefllError, unknown
from pefll.data.client import Batch
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN, Samples
from pefll.tasks import metrics as figures
from pefll.tasks.contract import BaseTask, sums_type
from pefll.tasks.metrics import Metric
from pefll.tasks.settings import check_at_least, check_function, chosen_metrics, constants, numbers

LOSSES = ("mse", "huber")
LEAST = 1e-12  # a smaller standard deviation counts as no deviation


@dataclass(frozen=True)
class Regression(BaseTask):
    """Trains numbers by squared error or Huber's loss; measures RMSE, MAE and R².

    Labels are standardised: models predict (y - mean) / deviation, with the mean and the standard deviation of the seen
    clients' training labels. So learning rates need not fit the unit of the labels. Predictions and metrics are in the
    unit of the labels; losses are in standard deviations.

    Attributes:
        loss_name: mse or huber.
        delta: where Huber's loss turns from squared to linear, in standard deviations.
        own_loss: your own function (outputs [b, k], labels [b, k]) -> [b], of standardised numbers.
        standardise: whether labels are standardised.
        extra: your own metrics, as `Metric`.
        mean: mean of each column of labels; taken from the data by `fit`.
        deviation: standard deviation of each column; taken from the data by `fit`.
    """

    loss_name: str = "mse"
    delta: float = 1.0
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    standardise: bool = True
    extra: Sequence[Metric] = ()
    mean: Sequence[float] = ()
    deviation: Sequence[float] = ()

    labels: ClassVar[str] = "numbers"

    def __post_init__(self) -> None:
        for name in ("mean", "deviation"):
            object.__setattr__(self, name, numbers(getattr(self, name), name))
        object.__setattr__(self, "extra", chosen_metrics(self.extra, {}))
        if self.loss_name not in LOSSES:
            raise unknown("loss", self.loss_name, LOSSES)
        check_at_least(self.delta, "delta", 0, inclusive=False)
        check_function(self.own_loss, "own_loss")
        if len(self.mean) != len(self.deviation) or not all(each > 0 for each in self.deviation):
            raise PefllError(
                "mean and deviation must have one number for each column of labels, and deviations above 0",
                code="PEFLL-S506",
            )

    @property
    def outputs(self) -> int:
        """The number of numbers per sample, k."""
        return len(self.mean)

    @property
    def measured(self) -> tuple[Metric, ...]:
        """RMSE, MAE, R², and the user's own."""
        return (
            Metric("rmse", figures.squares, figures.rmse, smaller_is_better=True, bounds=(0, float("inf"))),
            Metric("mae", figures.mae, smaller_is_better=True, bounds=(0, float("inf"))),
            # R² does not depend on the unit. Standardised numbers have smaller rounding errors in their squares.
            Metric(
                "r2",
                lambda output, y: figures.of_r2(self._standardised(output, output), self._standardised(y, output)),
                figures.r2,
            ),
            *(each for each in self.extra if isinstance(each, Metric)),
        )

    def bind(self, data: Federation) -> Self:
        """Return the task with the mean and deviation of the seen clients' training labels."""
        self.check(data)
        if self.mean:
            return self
        columns = data.y.shape[1] if data.y.dim() > 1 else 1
        if not self.standardise or not len(data.rows):
            return replace(self, mean=(0.0,) * columns, deviation=(1.0,) * columns)
        rows = torch.from_numpy(data.rows_of_clients(TRAIN, 0, data.num_seen)).to(data.y.device)
        y = data.y[rows].reshape(len(rows), columns).double()
        deviation = y.std(dim=0, correction=0)
        deviation = torch.where(deviation > LEAST, deviation, 1.0)
        # Rounded, so that equal labels in another order give equal numbers.
        return replace(self, mean=_rounded(y.mean(dim=0)), deviation=_rounded(deviation))

    def check(self, samples: Samples | Federation) -> None:
        """Raise PefllError unless labels are numbers, as many as the task has."""
        super().check(samples)
        columns = samples.y.shape[1] if samples.y.ndim > 1 else 1
        if self.mean and len(self.mean) != columns:
            raise PefllError(
                f"{samples.name} has {columns} numbers for each sample, but the task has {len(self.mean)}",
                code="PEFLL-S507",
            )

    def encode(self, y: Tensor) -> Tensor:
        """Return standardised labels, [b, k]."""
        return self._standardised(y, y)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b], the mean over its numbers."""
        wanted = self._standardised(y, output)
        if self.own_loss is not None:
            return self.own_loss(output, wanted)
        error = output - wanted
        if self.loss_name == "mse":
            return error.square().mean(dim=1)
        size = error.abs()
        near = 0.5 * error.square()
        return torch.where(size <= self.delta, near, self.delta * (size - 0.5 * self.delta)).mean(dim=1)

    def measure(self, output: Tensor, batch: Batch, known: Tensor | None) -> Any:
        """Return the number of samples, the sums of each metric in the unit of the labels, and the sum of the loss."""
        del known
        found, y = self._restored(output), batch.y.to(output.dtype)
        if y.dim() > 1 and y.shape[1] == 1:  # one number per sample is [b], for every metric
            y = y[:, 0]
        total = {each.name: figures.summed(each, found, y, batch) for each in self.measured}
        total = {"samples": batch.weight.sum()} | total | {"loss": batch.sum(self.loss(output, batch.y))}
        return sums_type(tuple(total))(*total.values())

    def predict(self, output: Tensor) -> Tensor:
        """Return the numbers [b], or [b, k], in the unit of the labels."""
        return super().predict(self._restored(output))

    def _standardised(self, y: Tensor, like: Tensor) -> Tensor:
        """Return labels [b] or [b, k] as standardised numbers [b, k], in the type of `like`."""
        mean, deviation = constants(self.mean, like), constants(self.deviation, like)
        return (y.reshape(len(y), -1).to(like.dtype) - mean) / deviation

    def _restored(self, output: Tensor) -> Tensor:
        return output * constants(self.deviation, output) + constants(self.mean, output)


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.9g}") for value in values.tolist())
