"""What a task is. Classification is one; the engines train and measure whatever a task says."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pefll.data.client import Batch
from pefll.data.federation import Samples


class Task(Protocol):
    """What the output of a model means. All functions are written for one client."""

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for one sample."""
        ...

    def check(self, samples: Samples) -> None:
        """Raise PefllError, in one sentence, where labels are not what the task needs."""
        ...

    def encode(self, y: Tensor) -> Tensor:
        """Return labels as an embedding network takes them, [b, e]."""
        ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b].

        Args:
            output: of the model, [b, outputs].
            y: labels [b].
        """
        ...

    def measure(self, output: Tensor, batch: Batch, known: Tensor) -> NamedTuple:
        """Return sums over the samples of a batch, so that batches and clients add up.

        Args:
            output: of the model, [b, outputs].
            batch: the samples, some of which may be padding of weight 0.
            known: what the client knows of labels: which classes occur in its training split, bool [outputs].
        """
        ...

    def metrics(self, sums: Any) -> dict[str, float]:
        """Return figures by name from summed sums; the first one chooses the best round."""
        ...

    def predict(self, output: Tensor) -> Tensor:
        """Return what a user wants to know, from outputs [b, outputs]."""
        ...
