"""Callbacks: who is told what happens in a run, from its history to a user's own logger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pefll.core import arguments
from pefll.core.errors import PefllError, unknown
from pefll.core.progress import Monitor
from pefll.runs.record import GROUPS
from pefll.training.evaluation import Accuracy
from pefll.training.resolve import RunSpec

Row = dict[str, Any]


@dataclass(eq=False)
class ActiveRun:
    """A run while it is trained, as callbacks see it.

    Attributes:
        spec: what it does, with everything decided: config, federation, method, folder, title.
        round: rounds done.
        history: its evaluations so far, oldest first, as in history.jsonl; those before it was resumed, too.
        summary: what came out, as in summary.json; empty before the end.
        stopped_by: the callback that stopped it; "" for none.
    """

    spec: RunSpec
    round: int = 0
    history: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str = ""


class Callback:
    """Is told what happens in a run. Override what you need; the rest does nothing.

        class Print(pefll.Callback):
            def on_evaluation(self, run, row):
                print(run.spec.title, row["round"], row["seen"]["per_sample"])

        pefll.fit(federation, callbacks=[Print()])

    Runs that are trained at once share their callbacks: each call says which run it is about.
    """

    def on_start(self, run: ActiveRun) -> None:
        """Training begins, or goes on after `run.round` rounds."""

    def on_rounds(self, run: ActiveRun) -> None:
        """Some more rounds are done; called up to a few times a second."""

    def on_evaluation(self, run: ActiveRun, row: Row) -> bool | None:
        """An evaluation is done.

        Args:
            run: with the row as the last one of its history.
            row: round, seconds, bytes, and the validation accuracies of seen and unseen clients.

        Returns:
            True to end the run with this round: it is tested and written as if no more rounds had been asked for.
        """

    def on_checkpoint(self, run: ActiveRun, round_: int) -> None:
        """The checkpoint of a round is on the disk. Only runs with a folder have checkpoints."""

    def on_end(self, run: ActiveRun) -> None:
        """The run has ended. `run.summary` is empty where it failed, or was stopped by a signal."""


class History(Callback):
    """Appends evaluations to history.jsonl in the run's folder."""

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Write a line."""
        if run.spec.folder:
            run.spec.folder.append_history(row)


@dataclass
class ProgressBar(Callback):
    """Moves one run's bar, `monitor`, and shows accuracies that are new."""

    monitor: Monitor
    news: str = ""

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Remember the accuracies."""
        groups = [f"{group} {100 * row[group]['per_sample']:.1f}%" for group in GROUPS if row[group]]
        self.news = f"validation: {', '.join(groups)}" if groups else ""

    def on_rounds(self, run: ActiveRun) -> None:
        """Move the bar; show accuracies that are new."""
        self.monitor.at(run.round, self.news)
        self.news = ""


class EarlyStopping(Callback):
    """Ends a run whose validation metric has not improved for some evaluations.

    It keeps nothing of its own, so that a resumed run stops where one in one go would.

    Args:
        patience: evaluations without an improvement.
        metric: a field of `pefll.Accuracy`; of `loss` less is better, of all others more.
        group: the clients: seen or unseen.
        min_delta: by how much a value must be better than the best one before.
    """

    def __init__(
        self, patience: int = 10, metric: str = "per_sample", group: str = "seen", min_delta: float = 0.0
    ) -> None:
        self._patience = arguments.whole_number(patience, "patience", 1)
        if metric not in Accuracy._fields:
            raise unknown("metric", metric, Accuracy._fields)
        if group not in GROUPS:
            raise unknown("group", group, GROUPS)
        self._metric, self._group, self._min_delta = metric, group, float(min_delta)

    def on_evaluation(self, run: ActiveRun, row: Row) -> bool:
        """Return whether the last improvement is too long ago."""
        sign = -1.0 if self._metric == "loss" else 1.0
        best, waited = -float("inf"), 0
        for one in run.history:
            if one[self._group] is None:  # no client of the group has validation samples
                continue
            value = sign * one[self._group][self._metric]
            best, waited = (value, 0) if value > best + self._min_delta else (best, waited + 1)
        return waited >= self._patience


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as a list; PefllError where something among them is none."""
    found = arguments.listed(callbacks, "callbacks", "[pefll.EarlyStopping()]")
    for one in found:
        if not isinstance(one, Callback):
            raise PefllError(
                f"callbacks holds {arguments.shown(one)}; each must be an instance of a class that extends "
                "pefll.Callback, such as pefll.EarlyStopping()",
                code="PEFLL-T127",
            )
    return found
