"""Classification: one of several classes for each sample."""

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
    """What a client tells about a model on one of its splits: sums, so that groups of clients can be added up.

    Attributes:
        samples: [] how many.
        correct: [] how many were right.
        masked: [] how many were right when scores of classes absent from its training labels are minus infinity.
        loss: [] the summed cross-entropy.
    """

    samples: Tensor
    correct: Tensor
    masked: Tensor
    loss: Tensor


@reference
def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, [b].

    Args:
        scores: [b, classes], the logarithms of probabilities up to a constant.
        y: int64 [b].
    """
    return scores.logsumexp(dim=1) - scores.gather(1, y[:, None]).squeeze(1)


@dataclass(frozen=True)
class Classification:
    """A model gives one score per class; it is trained by cross-entropy and judged by right answers.

    Attributes:
        classes: how many there are.
    """

    classes: int

    @property
    def outputs(self) -> int:
        """How many scores a model gives for one sample."""
        return self.classes

    def check(self, samples: Samples) -> None:
        """Raise PefllError where labels are not whole numbers from 0 to classes - 1."""
        if samples.classes != self.classes:
            raise PefllError(
                f"{samples.name} has {samples.classes} classes, and the task {self.classes}; make the task with "
                f"classes={samples.classes}",
                code="PEFLL-S020",
            )

    def encode(self, y: Tensor) -> Tensor:
        """Return labels [b] one-hot, [b, classes]; a sample without a label (-1) has zeros only."""
        return (y[:, None] == torch.arange(self.classes, device=y.device)).to(torch.float32)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [b]."""
        return cross_entropy(output, y)

    def measure(self, output: Tensor, batch: Batch, known: Tensor) -> Score:
        """Return how many samples there are, how many are right, also among known classes, and the summed loss."""
        kind = output.dtype
        right = (output.argmax(dim=1) == batch.y).to(kind)
        masked = (output.masked_fill(~known, -torch.inf).argmax(dim=1) == batch.y).to(kind)
        loss = cross_entropy(output, batch.y)
        return Score(batch.weight.sum(), batch.sum(right), batch.sum(masked), batch.sum(loss))

    def metrics(self, sums: Score) -> dict[str, float]:
        """Return accuracy, accuracy among known classes, and the mean loss."""
        samples = float(sums.samples)
        names = {"accuracy": sums.correct, "masked": sums.masked, "loss": sums.loss}
        return {name: float(total) / samples for name, total in names.items()}

    def predict(self, output: Tensor) -> Tensor:
        """Return the class with the largest score, int64 [b]."""
        return output.argmax(dim=1)
