"""Callbacks: objects that are called on events of a run, such as the history, the progress bar and loggers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from pefll.core import arguments
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.plugins import fault
from pefll.core.progress import Monitor
from pefll.core.warning import warn
from pefll.core.wording import counted
from pefll.runs.record import GROUPS, first_figure, meant
from pefll.training.resolve import RunSpec

Row = dict[str, Any]


@dataclass(eq=False, repr=False)
class ActiveRun:
    """A run during training, as callbacks see it.

    Attributes:
        spec: its config, federation, method, folder and title.
        round: number of rounds done.
        history: all evaluations so far, oldest first, as in history.jsonl.
        summary: results, as in summary.json; empty before the end.
        stopped_by: the class name of the callback that stopped it; "" for none.
        errors: the names of the metrics that are better when smaller; known after the first evaluation.
        shares: the names of the user's metrics that are shown in per cent; known after the first evaluation.
        failure: the error of a callback that failed; the run then ends and is saved.
        tell: shows a sentence to the user: on the console, or as a warning.
    """

    spec: RunSpec
    round: int = 0
    history: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str = ""
    errors: tuple[str, ...] = ("loss",)
    shares: tuple[str, ...] = ()
    failure: PefllError | None = None
    tell: Callable[[str], None] = warn

    def __repr__(self) -> str:
        return f"<ActiveRun {self.spec.title!r}, round {self.round:,} of {self.spec.config.rounds:,}>"

    def ends(self, asked_to_stop: Sequence[int]) -> bool:
        """Return whether no more rounds start, because of signals so far or because a callback failed."""
        return bool(asked_to_stop) or self.failure is not None


class Callback:
    """An object whose methods are called on events of a run. Override those you need; the others do nothing.

        class Print(pefll.Callback):
            def on_evaluation(self, run, row):
                print(run.spec.title, row["round"], row["seen"]["per_sample"])

        pefll.fit(federation, callbacks=[Print()])

    Runs that train at once share their callbacks; `run` says which run a call is about. If a method raises an error,
    the run writes a checkpoint and ends with a PefllError that names the callback.
    """

    def on_start(self, run: ActiveRun) -> None:
        """Training starts, or resumes after `run.round` rounds."""

    def on_rounds(self, run: ActiveRun) -> None:
        """More rounds are done; called at most a few times a second."""

    def on_evaluation(self, run: ActiveRun, row: Row) -> bool | None:
        """An evaluation is done.

        Args:
            run: the run; `row` is the last row of its history.
            row: round, seconds, bytes, and the validation metrics of seen and unseen clients. It is a copy.

        Returns:
            True to end the run after this round. The run is then tested and written as usual. Any other value than
            True, False and None is an error.
        """

    def on_checkpoint(self, run: ActiveRun, round_: int) -> None:
        """The checkpoint of a round has been written. Only runs with a folder have checkpoints."""

    def on_end(self, run: ActiveRun) -> None:
        """The run has ended. `run.summary` is empty if it failed or a signal stopped it."""


@dataclass(eq=False)
class Guarded(Callback):
    """Calls a user's callback for one run. Its first error is kept in `run.failure`, and it is not called again."""

    callback: Callback
    failed: bool = False

    def on_start(self, run: ActiveRun) -> None:
        """Training starts."""
        self._call(run, "on_start")

    def on_rounds(self, run: ActiveRun) -> None:
        """More rounds are done."""
        self._call(run, "on_rounds")

    def on_evaluation(self, run: ActiveRun, row: Row) -> bool:
        """An evaluation is done; return whether to end the run."""
        answer = self._call(run, "on_evaluation", copy.deepcopy(row))
        # A generator or a figure is true, too: it would end the run, and nobody would know why.
        truth = isinstance(answer, torch.Tensor) and answer.dtype == torch.bool and answer.ndim == 0
        if answer is None or isinstance(answer, bool | np.bool_) or truth:
            return bool(answer)
        self._fail(run, "on_evaluation", TypeError(f"it returned {arguments.shown(answer)}, but only True ends a run"))
        return False

    def on_checkpoint(self, run: ActiveRun, round_: int) -> None:
        """A checkpoint has been written."""
        self._call(run, "on_checkpoint", round_)

    def on_end(self, run: ActiveRun) -> None:
        """The run has ended. A callback that failed may close its files here."""
        before, self.failed = self.failed, False
        self._call(run, "on_end")
        self.failed |= before

    def _call(self, run: ActiveRun, event: str, *arguments: Any) -> Any:
        if self.failed:
            return None
        try:
            return getattr(self.callback, event)(run, *arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything
            self._fail(run, event, error)
            return None

    def _fail(self, run: ActiveRun, event: str, error: BaseException) -> None:
        self.failed = True
        if run.failure is None:
            run.failure = self._failure(run, event, error)

    def _failure(self, run: ActiveRun, event: str, error: BaseException) -> PefllError:
        """Return the error that ends the run. The text of a PefllError is a sentence already."""
        where = f"{run.spec.title}: the callback {name_of(self)} failed in {event}"
        verb = "is" if run.round == 1 else "are"
        saved = f"its {counted(run.round, 'round')} {verb} saved" if run.spec.folder and run.round else ""
        if isinstance(error, PefllError):
            return PefllError("; ".join(part for part in (f"{where}: {error.args[0]}", saved) if part), error.code)
        why = fault(error) or f"{type(error).__name__}: {first_line(error)}"
        advice = f"{saved}; correct the callback, or leave it out" if saved else "correct it, or leave it out"
        return PefllError(f"{where}: {why}; {advice}", code="PEFLL-T550")


class History(Callback):
    """Appends evaluations to history.jsonl in the run's folder."""

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Append a line."""
        if run.spec.folder:
            run.spec.folder.append_history(row)


@dataclass
class ProgressBar(Callback):
    """Updates the progress bar of one run, `monitor`, and shows new accuracies."""

    monitor: Monitor
    news: str = ""

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Store the accuracies for the next update."""
        groups = [f"{group} {first_figure(row[group], run.shares)}" for group in GROUPS if row[group]]
        self.news = f"validation: {', '.join(groups)}" if groups else ""

    def on_rounds(self, run: ActiveRun) -> None:
        """Update the bar; show new accuracies."""
        self.monitor.at(run.round, self.news)
        self.news = ""


class EarlyStopping(Callback):
    """Ends a run whose validation metric has not improved for some evaluations.

    It reads the run's history and keeps no state. So a resumed run stops at the same round as an uninterrupted one.

    Args:
        patience: number of evaluations without an improvement, after which the run ends.
        metric: a metric in the history, such as a field of `pefll.Accuracy`; by default the one that chooses the best
            round. Lower is better for the loss and for errors of the task, higher for the others.
        group: seen or unseen clients. Some methods do not evaluate unseen clients during training.
        min_delta: a value must be better than the best one so far by more than this.
    """

    def __init__(self, patience: int = 10, metric: str = "", group: str = "seen", min_delta: float = 0.0) -> None:
        self._patience = arguments.whole_number(patience, "patience", 1)
        if group not in GROUPS:
            raise unknown("group", group, GROUPS)
        self._metric, self._group = arguments.text(metric, "metric", "loss"), group
        self._min_delta = arguments.number(min_delta, "min_delta")
        if self._min_delta < 0:
            raise PefllError(
                f"min_delta is {self._min_delta:g}; it cannot be negative, because an equal value would then be better",
                code="PEFLL-T662",
            )

    @property
    def group(self) -> str:
        """The clients whose metric it watches: seen or unseen."""
        return self._group

    def check(self, metrics: Sequence[str], not_evaluated: str = "") -> None:
        """Raise PefllError if a run will not have its metric, or will not evaluate its clients.

        Args:
            metrics: the metrics that the run will have.
            not_evaluated: why its group of clients is not evaluated during training; "" if it is.
        """
        if not_evaluated:
            advice = "leave it out" if self._group == "seen" else "choose group='seen', or leave it out"
            raise PefllError(
                f"early stopping would never stop: {self._group} clients are not evaluated during training, because "
                f"{not_evaluated}; {advice}",
                code="PEFLL-T660",
            )
        if self._metric and meant(self._metric, metrics) not in metrics:
            raise unknown("metric", self._metric, metrics)

    def on_evaluation(self, run: ActiveRun, row: Row) -> bool:
        """Return whether the last improvement is `patience` evaluations ago."""
        metric = self._metric or next(iter(row[self._group] or {}), "")
        sign = -1.0 if metric in run.errors else 1.0
        best, waited = -float("inf"), 0
        for one in run.history:
            # No client of the group may have validation samples, or the metric may not be defined.
            figures = one[self._group]
            if figures is None or (figure := figures[meant(metric, figures)]) is None:
                continue
            value = sign * figure
            best, waited = (value, 0) if value > best + self._min_delta else (best, waited + 1)
        return waited >= self._patience


def name_of(callback: Callback) -> str:
    """Return the name of a callback in sentences and in a run's summary: its class."""
    return type(callback.callback if isinstance(callback, Guarded) else callback).__name__


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as a list; PefllError if one is not a Callback."""
    found = arguments.listed(callbacks, "callbacks", "[pefll.EarlyStopping()]")
    for one in found:
        if not isinstance(one, Callback):
            raise PefllError(
                f"callbacks holds {arguments.shown(one)}; each must be an instance of a class that extends "
                "pefll.Callback, such as pefll.EarlyStopping()",
                code="PEFLL-T127",
            )
        _check_events(one)
    return found


def _check_events(callback: Callback) -> None:
    """Raise PefllError for a method with the name of no event, such as `on_eval`, which nobody would call."""
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for kind in type(callback).__mro__:
        for name, value in vars(kind).items() if issubclass(kind, Callback) else ():
            if name.startswith("on_") and callable(value) and name not in events:
                near = get_close_matches(name, events, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise PefllError(
                    f"the callback {kind.__name__} has {name}, which is no event: {hint}events are {', '.join(events)}",
                    code="PEFLL-T661",
                )
