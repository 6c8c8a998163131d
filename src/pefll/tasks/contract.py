"""The interface of a task: what a model's output means. Engines train and measure models for any such object."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.wording import argument
from pefll.data.client import Batch
from pefll.data.federation import Federation
from pefll.data.samples import Samples
from pefll.tasks.metrics import Metric, check_metrics, summed
from pefll.tasks.own import ask, attribute, wrong


class Task(Protocol):
    """The meaning of a model's output. All functions on tensors are written for one client."""

    labels: ClassVar[str]
    """What labels must be: `"classes"`, `"numbers"` or `"sets"`; see `Samples`."""

    @property
    def outputs(self) -> int:
        """The number of a model's outputs per sample."""
        ...

    @property
    def encoded(self) -> int:
        """The number of values of an encoded label, e."""
        ...

    @property
    def errors(self) -> tuple[str, ...]:
        """The names of the metrics that are better when smaller."""
        ...

    def bind(self, data: Federation) -> Task:
        """Return the task with everything that it takes from the data; PefllError if the data does not fit."""
        ...

    def check(self, samples: Samples | Federation) -> None:
        """Raise PefllError for labels that do not fit the task."""
        ...

    def encode(self, y: Tensor) -> Tensor:
        """Return labels [b, ...] as input of an embedding network, [b, e]."""
        ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b].

        Args:
            output: output of the model, [b, outputs].
            y: labels [b, ...].
        """
        ...

    def measure(self, output: Tensor, batch: Batch, known: Tensor | None) -> NamedTuple:
        """Return sums over the samples of a batch; the first one, `samples`, is their number.

        Sums of batches and clients are added.

        Args:
            output: output of the model, [b, outputs].
            batch: the samples; padding has weight 0.
            known: bool [classes], which classes occur in the client's training split; None without classes.
        """
        ...

    def metrics(self, sums: Any) -> dict[str, float]:
        """Return metrics by name from added sums; the first one chooses the best round."""
        ...

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value that one sample can add to each sum; sums without bounds lack."""
        ...

    def predict(self, output: Tensor) -> Tensor:
        """Return predictions for outputs [b, outputs]: classes [b], numbers [b, ...], or sets [b, k]."""
        ...


@lru_cache
def sums_type(names: tuple[str, ...]) -> Any:
    """Return a NamedTuple type with these fields; equal names give the same type."""
    return namedtuple("Sums", names)


@dataclass(frozen=True)
class BaseTask:
    """What most tasks share. A task is a frozen dataclass of settings, made before anybody knows the data.

    A subclass defines `outputs` and `loss`. By default, labels are numbers, and the only metric is the mean loss.
    """

    labels: ClassVar[str] = "numbers"

    @property
    def outputs(self) -> int:
        """The number of a model's outputs per sample."""
        raise NotImplementedError

    @property
    def encoded(self) -> int:
        """The number of values of an encoded label."""
        return self.outputs

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics beside the loss; the first one chooses the best round."""
        return ()

    @property
    def errors(self) -> tuple[str, ...]:
        """The names of the metrics that are better when smaller."""
        return ("loss", *(each.name for each in self.measured if each.smaller_is_better))

    @property
    def shares(self) -> tuple[str, ...]:
        """The names of the user's metrics that are shares, which are shown in per cent."""
        return tuple(each.name for each in self.measured if each.is_share)

    def bind(self, data: Federation) -> Self:
        """Return the task for a federation; PefllError if its labels do not fit."""
        ask(self, "check", data)
        return self

    def check(self, samples: Samples | Federation) -> None:
        """Raise PefllError for labels of another kind than the task's."""
        check_kind(self, samples)
        measured = attribute(self, "measured")
        if not isinstance(measured, tuple | list):
            raise wrong(self, "measured", measured)
        check_metrics(measured, ("samples", "loss"))

    def encode(self, y: Tensor) -> Tensor:
        """Return labels [b] or [b, e] as numbers [b, e]."""
        return y.reshape(len(y), -1).to(torch.get_default_dtype() if not y.is_floating_point() else y.dtype)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [b]."""
        raise NotImplementedError

    def measure(self, output: Tensor, batch: Batch, known: Tensor | None) -> Any:
        """Return the number of samples, the sums of each metric, and the sum of the loss."""
        del known
        total = [
            batch.weight.sum(),
            *(summed(each, output, batch.y, batch) for each in self.measured),
        ]
        names = ("samples", *(each.name for each in self.measured), "loss")
        return sums_type(names)(*total, batch.sum(self.loss(output, batch.y)))

    def metrics(self, sums: Any) -> dict[str, float]:
        """Return the figure of each metric, and the mean loss."""
        samples = float(sums.samples)
        found = {
            each.name: float(each.figure(np.asarray(getattr(sums, each.name), dtype=np.float64), samples))
            for each in self.measured
        }
        return found | {"loss": float(sums.loss) / samples}

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value that one sample can add to each sum that has bounds."""
        return {each.name: each.bounds for each in self.measured if each.bounds is not None}

    def predict(self, output: Tensor) -> Tensor:
        """Return the outputs; one number per sample as [b]."""
        return output[:, 0] if output.shape[1] == 1 else output

    def probabilities(self, output: Tensor) -> Tensor | None:
        """Return the probability of each class, or of each member of a set, [b, k]; None if the task gives none."""
        del output
        return None


def check_kind(task: Any, samples: Samples | Federation) -> None:
    """Raise PefllError if the labels of samples are of another kind than the task's."""
    if samples.labels != task.labels:
        name, other = type(task).__name__, f"give other labels, or leave out {argument('task')}"
        advice = _ADVICE.get((samples.labels, task.labels), other)
        raise PefllError(
            f"{samples.name}: its labels are {samples.labels}, but the task {name} needs {task.labels}; {advice}",
            code="PEFLL-S500",
        )


_ADVICE = {
    ("numbers", "classes"): "convert classes to whole numbers from 0, with y.astype(int)",
    ("numbers", "sets"): "if they are 0 and 1, say labels='sets' where you give the data",
    ("sets", "numbers"): "say labels='numbers' where you give the data",
    ("sets", "classes"): "if each set has one member, convert them to classes with y.argmax(axis=1)",
    ("classes", "sets"): "give a matrix [N, k] with 1 for each member",
    ("classes", "numbers"): "classes with names are no numbers, so give the labels as numbers in data of your own",
}
