"""Multi-label classification: each sample has a set of labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.data.federation import Federation
from pefll.data.samples import Samples
from pefll.tasks.contract import BaseTask
from pefll.tasks.metrics import Metric, set_accuracy, set_auc, set_macro_f1, set_micro_f1
from pefll.tasks.settings import check_at_least, check_function, chosen_metrics, constants, numbers

METRICS = {"auc": set_auc}


@dataclass(frozen=True)
class MultiLabel(BaseTask):
    """Trains the log-odds of each member of a set by binary cross-entropy; measures micro F1, macro F1 and accuracy.

    Attributes:
        members: number of possible members, k; 0 for as many as the data has.
        threshold: a member is predicted if its probability is above this.
        positive_weights: factor of each member's loss where it is in the set; empty for 1.
        own_loss: your own function (log-odds [b, k], sets [b, k]) -> [b], instead of binary cross-entropy.
        extra: further metrics: auc, or your own `Metric`.
    """

    members: int = 0
    threshold: float = 0.5
    positive_weights: Sequence[float] = ()
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    extra: Sequence[str | Metric] = ()

    labels: ClassVar[str] = "sets"

    def __post_init__(self) -> None:
        object.__setattr__(self, "positive_weights", numbers(self.positive_weights, "positive_weights"))
        object.__setattr__(self, "extra", chosen_metrics(self.extra, METRICS))
        check_at_least(self.threshold, "threshold", 0, 1, inclusive=False)
        check_function(self.own_loss, "own_loss")

    @property
    def outputs(self) -> int:
        """The number of log-odds per sample."""
        return self.members

    @property
    def measured(self) -> tuple[Metric, ...]:
        """Micro F1, macro F1, accuracy, and further metrics."""
        own = (METRICS[each](self.members, self.threshold) if isinstance(each, str) else each for each in self.extra)
        usual = (make(self.members, self.threshold) for make in (set_micro_f1, set_macro_f1, set_accuracy))
        return (*usual, *own)

    def bind(self, data: Federation) -> Self:
        """Return the task with the number of members of the data."""
        bound = self if self.members or data.labels != "sets" else replace(self, members=data.y.shape[1])
        bound.check(data)
        return bound

    def check(self, samples: Samples | Federation) -> None:
        """Raise PefllError unless labels are sets of as many members as the task has."""
        super().check(samples)
        if samples.y.shape[1] != self.members:
            raise PefllError(
                f"{samples.name} has sets of {samples.y.shape[1]}, but the task has {self.members} members",
                code="PEFLL-S508",
            )
        if self.positive_weights and len(self.positive_weights) != self.members:
            raise PefllError(
                f"there are {len(self.positive_weights)} positive_weights for {self.members} members; give one each",
                code="PEFLL-S509",
            )

    def encode(self, y: Tensor) -> Tensor:
        """Return sets [b, k] as numbers; missing labels (-1) become zeros."""
        return super().encode(y.clamp(min=0))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b], the mean over members."""
        wanted = y.to(output.dtype)
        if self.own_loss is not None:
            return self.own_loss(output, wanted)
        there, absent = F.softplus(-output), F.softplus(output)
        if self.positive_weights:
            there = constants(self.positive_weights, output) * there
        return (wanted * there + (1 - wanted) * absent).mean(dim=1)

    def predict(self, output: Tensor) -> Tensor:
        """Return which members are in each set, bool [b, k]."""
        return self.probabilities(output) > self.threshold

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each member, [b, k]."""
        return output.sigmoid()
