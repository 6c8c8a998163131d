"""The figures of an evaluation: how good the models of seen and of unseen clients are."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pefll.core.errors import PefllError
from pefll.runs.record import first_figure


class NoFigure(PefllError, AttributeError):
    """An evaluation has no figure of this name."""


def _no_figure(there: Sequence[str], name: str) -> NoFigure:
    return NoFigure(f"there is no {name!r}; there are {', '.join(there)}", code="PEFLL-T633")


class Accuracy(NamedTuple):
    """How good the models of a group of clients are.

    Attributes:
        per_sample: the share of correct samples among all clients' samples; every sample counts the same.
        per_client: the mean of the clients' accuracies; every client counts the same.
        masked: like per_sample, but a client's model may not choose classes that its training labels lack.
        worst_tenth: the mean accuracy of the worst tenth of the clients.
        loss: the mean cross-entropy.
    """

    per_sample: float
    per_client: float
    masked: float
    worst_tenth: float
    loss: float

    @property
    def accuracy(self) -> float:
        """The same as per_sample."""
        return self.per_sample

    @property
    def errors(self) -> tuple[str, ...]:
        """The names of the fields that are better when smaller."""
        return ("loss",)

    @property
    def shares(self) -> tuple[str, ...]:
        """The names of the user's metrics that are shown in per cent."""
        return ()

    def __getattr__(self, name: str) -> Any:
        raise _no_figure(self._fields, name)


@lru_cache
def figures_type(names: tuple[str, ...], errors: tuple[str, ...], shares: tuple[str, ...]) -> Any:
    """Return the NamedTuple type for the metrics of a group.

    Args:
        names: of the metrics.
        errors: those that are better when smaller.
        shares: those of the user's that are shown in per cent.
    """
    fields = namedtuple("Figures", names)  # type: ignore[misc]  # a task names the fields
    more: dict[str, Any] = {"errors": property(lambda self: errors), "shares": property(lambda self: shares)}
    more["__getattr__"] = Accuracy.__getattr__
    if "per_sample" in names:
        more["accuracy"] = Accuracy.accuracy
    return type("Figures", (fields,), {"__slots__": (), **more})


class Evaluation(NamedTuple):
    """The metrics of seen clients and of unseen clients; None for a group without samples.

    In classification, a group is an `Accuracy`, perhaps with further metrics. For other tasks, a group is a NamedTuple:
    the metric that chooses the best round, its mean over clients (`per_client`), its mean over the worst tenth of the
    clients (`worst_tenth`), and the other metrics of the task.
    """

    seen: Any
    unseen: Any

    def __str__(self) -> str:
        groups = {"seen": self.seen, "unseen": self.unseen}
        return ", ".join(
            f"{name} {first_figure(group._asdict(), group.shares)}" for name, group in groups.items() if group
        )

    def __getattr__(self, name: str) -> Any:
        if any(group and hasattr(group, name) for group in self):
            raise NoFigure(f"each group has its own {name}; write seen.{name} or unseen.{name}", code="PEFLL-T634")
        raise _no_figure(self._fields, name)

    def rows(self) -> dict[str, dict[str, float | None] | None]:
        """Return the metrics of each group by name, as in history.jsonl; None for what is not defined."""
        found: dict[str, dict[str, float | None] | None] = {}
        for name, group in self._asdict().items():
            values = group._asdict().items() if group else ()
            found[name] = {key: None if math.isnan(value) else value for key, value in values} or None
        return found
