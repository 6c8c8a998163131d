"""Classification: each sample has one of several classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.data.client import Batch
from pefll.data.federation import Samples


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
class Classification:
    """Trains one score per class by cross-entropy, and measures accuracy.

    Attributes:
        classes: number of classes.
    """

    classes: int

    @property
    def outputs(self) -> int:
        """The number of scores per sample."""
        return self.classes

    def check(self, samples: Samples) -> None:
        """Raise PefllError if the samples' number of classes is not that of the task."""
        if samples.classes != self.classes:
            raise PefllError(
                f"{samples.name} has {samples.classes} classes, but the task has {self.classes}; make the task with "
                f"classes={samples.classes}",
                code="PEFLL-S020",
            )

    def encode(self, y: Tensor) -> Tensor:
        """Return labels [b] one-hot, [b, classes]; a missing label (-1) becomes zeros."""
        return (y[:, None] == torch.arange(self.classes, device=y.device)).to(torch.float32)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [b]."""
        return cross_entropy(output, y)

    def measure(self, output: Tensor, batch: Batch, known: Tensor) -> Score:
        """Return the sums of a batch; see `Score`."""
        kind = output.dtype
        right = (output.argmax(dim=1) == batch.y).to(kind)
        masked = (output.masked_fill(~known, -torch.inf).argmax(dim=1) == batch.y).to(kind)
        loss = cross_entropy(output, batch.y)
        return Score(batch.weight.sum(), batch.sum(right), batch.sum(masked), batch.sum(loss))

    def metrics(self, sums: Score) -> dict[str, float]:
        """Return accuracy, masked accuracy and mean loss."""
        samples = float(sums.samples)
        names = {"accuracy": sums.correct, "masked": sums.masked, "loss": sums.loss}
        return {name: float(total) / samples for name, total in names.items()}

    def predict(self, output: Tensor) -> Tensor:
        """Return the class with the largest score, int64 [b]."""
        return output.argmax(dim=1)
