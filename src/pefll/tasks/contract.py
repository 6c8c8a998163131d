"""The interface of a task. Engines can train and measure models for any object with this interface."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pefll.data.client import Batch
from pefll.data.federation import Samples


class Task(Protocol):
    """The meaning of a model's output. All functions are written for one client."""

    @property
    def outputs(self) -> int:
        """The number of a model's outputs per sample."""
        ...

    def check(self, samples: Samples) -> None:
        """Raise PefllError for labels that do not fit the task."""
        ...

    def encode(self, y: Tensor) -> Tensor:
        """Return labels [b] as input of an embedding network, [b, e]."""
        ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b].

        Args:
            output: output of the model, [b, outputs].
            y: labels [b].
        """
        ...

    def measure(self, output: Tensor, batch: Batch, known: Tensor) -> NamedTuple:
        """Return sums over the samples of a batch. Sums of batches and clients can be added.

        Args:
            output: output of the model, [b, outputs].
            batch: the samples; padding has weight 0.
            known: bool [outputs], which classes occur in the client's training split.
        """
        ...

    def metrics(self, sums: Any) -> dict[str, float]:
        """Return metrics by name from added sums, the most important one first."""
        ...

    def predict(self, output: Tensor) -> Tensor:
        """Return predictions for outputs [b, outputs]."""
        ...
