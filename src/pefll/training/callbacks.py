"""Callbacks: they hear what happens in a run. The history, the progress bar and loggers are callbacks."""

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
        spec: its config, federation, method, folder and title.
        round: rounds done.
        history: all evaluations so far, oldest first, as in history.jsonl.
        summary: results, as in summary.json; empty before the end.
        stopped_by: the class of the callback that stopped it; "" for none.
    """

    spec: RunSpec
    round: int = 0
    history: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str = ""


class Callback:
    """Hears what happens in a run. Override what you need; the rest does nothing.

        class Print(pefll.Callback):
            def on_evaluation(self, run, row):
                print(run.spec.title, row["round"], row["seen"]["per_sample"])

        pefll.fit(federation, callbacks=[Print()])

    Runs that are trained at once share their callbacks; `run` says which run a call is about.
    """

    def on_start(self, run: ActiveRun) -> None:
        """Training starts, or resumes after `run.round` rounds."""

    def on_rounds(self, run: ActiveRun) -> None:
        """Some more rounds are done; called up to a few times a second."""

    def on_evaluation(self, run: ActiveRun, row: Row) -> bool | None:
        """An evaluation is done.

        Args:
            run: its last row of history is this one.
            row: round, seconds, bytes, and the validation accuracies of seen and unseen clients.

        Returns:
            True to end the run with this round. It is then tested and written as usual.
        """

    def on_checkpoint(self, run: ActiveRun, round_: int) -> None:
        """The checkpoint of a round is on the disk. Only runs with a folder have checkpoints."""

    def on_end(self, run: ActiveRun) -> None:
        """The run has ended. `run.summary` is empty if it failed or a signal stopped it."""


class History(Callback):
    """Appends evaluations to history.jsonl in the run's folder."""

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Append a line."""
        if run.spec.folder:
            run.spec.folder.append_history(row)


@dataclass
class ProgressBar(Callback):
    """Moves one run's bar, `monitor`, and shows new accuracies."""

    monitor: Monitor
    news: str = ""

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Remember the accuracies."""
        groups = [f"{group} {100 * row[group]['per_sample']:.1f}%" for group in GROUPS if row[group]]
        self.news = f"validation: {', '.join(groups)}" if groups else ""

    def on_rounds(self, run: ActiveRun) -> None:
        """Move the bar; show new accuracies."""
        self.monitor.at(run.round, self.news)
        self.news = ""


class EarlyStopping(Callback):
    """Ends a run whose validation metric has not improved for some evaluations.

    It reads the run's history and keeps no state. So a resumed run stops where a run without a break would.

    Args:
        patience: evaluations without an improvement.
        metric: a field of `pefll.Accuracy`; a lower loss is better, and a higher value of the others.
        group: seen or unseen clients.
        min_delta: the least difference to the best value before that counts as an improvement.
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
        """Return whether the last improvement is `patience` evaluations ago."""
        sign = -1.0 if self._metric == "loss" else 1.0
        best, waited = -float("inf"), 0
        for one in run.history:
            if one[self._group] is None:  # no client of the group has validation samples
                continue
            value = sign * one[self._group][self._metric]
            best, waited = (value, 0) if value > best + self._min_delta else (best, waited + 1)
        return waited >= self._patience


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as a list; PefllError for a value that is no callback."""
    found = arguments.listed(callbacks, "callbacks", "[pefll.EarlyStopping()]")
    for one in found:
        if not isinstance(one, Callback):
            raise PefllError(
                f"callbacks holds {arguments.shown(one)}; each must be an instance of a class that extends "
                "pefll.Callback, such as pefll.EarlyStopping()",
                code="PEFLL-T127",
            )
    return found
