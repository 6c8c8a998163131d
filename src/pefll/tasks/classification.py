"""Classification: each sample has one of several classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.data.client import Batch
from pefll.data.federation import Federation
from pefll.data.samples import Samples
from pefll.tasks.contract import BaseTask, check_kind, sums_type
from pefll.tasks.metrics import Metric, auc, calibration_error, check_metrics, macro_f1, summed
from pefll.tasks.settings import check_at_least, check_function, chosen_metrics, constants, numbers

# Metrics that a user may name, beside those that there always are.
METRICS = {"macro_f1": macro_f1, "calibration_error": calibration_error, "auc": auc}


class Score(NamedTuple):
    """A model's results on one split of a client, as sums that can be added over clients.

    Attributes:
        samples: [], number of samples.
        correct: [], number of right predictions.
        masked: [], number of right predictions if only classes of the client's training labels can be predicted.
        loss: [], sum of the cross-entropy.
    """

    samples: Tensor
    correct: Tensor
    masked: Tensor
    loss: Tensor


@reference
def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, [b].

    Args:
        scores: [b, classes], log-probabilities up to a constant.
        y: int64 [b].
    """
    return scores.logsumexp(dim=1) - scores.gather(1, y[:, None]).squeeze(1)


@dataclass(frozen=True)
class Classification(BaseTask):
    """Trains one score per class, by default by cross-entropy, and measures accuracy.

    Attributes:
        classes: number of classes; 0 for as many as the data has.
        label_smoothing: share of a label that is spread evenly over all classes.
        class_weights: factor of each class's loss; empty for 1.
        focal: γ of the focal loss, which multiplies the cross-entropy by (1 - p)^γ for the probability p of the label.
        own_loss: your own function (scores [b, classes], labels [b]) -> [b], instead of cross-entropy.
        extra: further metrics: macro_f1, auc, calibration_error, or your own `Metric`.
    """

    classes: int = 0
    label_smoothing: float = 0.0
    class_weights: Sequence[float] = ()
    focal: float = 0.0
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    extra: Sequence[str | Metric] = ()

    labels: ClassVar[str] = "classes"

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weights", numbers(self.class_weights, "class_weights"))
        object.__setattr__(self, "extra", chosen_metrics(self.extra, METRICS))
        check_at_least(self.label_smoothing, "label_smoothing", 0, 1)
        check_at_least(self.focal, "focal", 0)
        check_function(self.own_loss, "own_loss")
        if self.own_loss is not None and (self.label_smoothing or self.class_weights or self.focal):
            raise PefllError(
                "own_loss replaces cross-entropy, so it cannot have label_smoothing, class_weights or focal; leave "
                "these out",
                code="PEFLL-S504",
            )

    @property
    def outputs(self) -> int:
        """The number of scores per sample."""
        return self.classes

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics beside accuracy and loss."""
        return tuple(METRICS[each](self.classes) if isinstance(each, str) else each for each in self.extra)

    def bind(self, data: Federation) -> Self:
        """Return the task with the number of classes of the data."""
        check_kind(self, data)
        bound = self if self.classes else replace(self, classes=data.classes)
        bound.check(data)
        return bound

    def check(self, samples: Samples | Federation) -> None:
        """Raise PefllError if the samples' number of classes is not that of the task."""
        check_kind(self, samples)
        if samples.classes != self.classes:
            raise PefllError(
                f"{samples.name} has {samples.classes} classes, but the task has {self.classes}; make the task with "
                f"classes={samples.classes}",
                code="PEFLL-S020",
            )
        if self.class_weights and len(self.class_weights) != self.classes:
            raise PefllError(
                f"there are {len(self.class_weights)} class_weights for {self.classes} classes; give one each",
                code="PEFLL-S505",
            )
        names = [each if isinstance(each, str) else each.name for each in self.extra]
        if [getattr(each, "name", None) for each in self.measured] != names:
            raise PefllError(
                f"the task {type(self).__name__} has `measured` of its own, but a classification measures accuracy "
                "first, and then what `extra` names; give own metrics as extra=[...]",
                code="PEFLL-S644",
            )
        check_metrics(self.measured, (*Score._fields, "accuracy"))

    def encode(self, y: Tensor) -> Tensor:
        """Return labels [b] one-hot, [b, classes]; a missing label (-1) becomes zeros."""
        return (y[:, None] == torch.arange(self.classes, device=y.device)).to(torch.float32)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b]."""
        if self.own_loss is not None:
            return self.own_loss(output, y)
        loss = label_loss = cross_entropy(output, y)
        if self.label_smoothing:
            evenly = output.logsumexp(dim=1) - output.mean(dim=1)
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * evenly
        if self.focal:
            # The gradient of a power of 0 is not finite, so 1 - p is at least a small number.
            loss = (1 - (-label_loss).exp()).clamp(min=1e-6) ** self.focal * loss
        if self.class_weights:
            loss = constants(self.class_weights, output).gather(0, y) * loss
        return loss

    def measure(self, output: Tensor, batch: Batch, known: Tensor | None) -> Any:
        """Return the sums of a batch: a `Score`, and the sums of further metrics."""
        kind = output.dtype
        right = (output.argmax(dim=1) == batch.y).to(kind)
        assert known is not None
        masked = (output.masked_fill(~known, -torch.inf).argmax(dim=1) == batch.y).to(kind)
        loss = self.loss(output, batch.y)
        score = Score(batch.weight.sum(), batch.sum(right), batch.sum(masked), batch.sum(loss))
        if not self.extra:
            return score
        more = {each.name: summed(each, output, batch.y, batch) for each in self.measured}
        return sums_type((*Score._fields, *more))(*score, *more.values())

    def metrics(self, sums: Any) -> dict[str, float]:
        """Return accuracy, masked accuracy, mean loss, and further metrics."""
        samples = float(sums.samples)
        names = {"accuracy": sums.correct, "masked": sums.masked, "loss": sums.loss}
        found = {name: float(total) / samples for name, total in names.items()}
        return found | {each.name: float(each.figure(_array(sums, each), samples)) for each in self.measured}

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value that one sample can add to each sum that has bounds."""
        return {"correct": (0, 1), "masked": (0, 1)} | super().bounds()

    def predict(self, output: Tensor) -> Tensor:
        """Return the class with the largest score, int64 [b]."""
        return output.argmax(dim=1)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each class, [b, classes]."""
        return output.softmax(dim=1)


def is_cross_entropy(task: Any) -> bool:
    """Return whether a task's loss is cross-entropy alone. A subclass of Classification may have another loss."""
    if type(task) is not Classification:
        return False
    return not (task.label_smoothing or task.class_weights or task.focal) and task.own_loss is None


def _array(sums: Any, metric: Metric) -> Any:
    return np.asarray(getattr(sums, metric.name), dtype=np.float64)
