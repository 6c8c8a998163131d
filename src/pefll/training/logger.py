"""The base of loggers: callbacks that send the figures of each evaluation to a tracker of experiments."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

from pefll.core.errors import PefllError, first_line
from pefll.runs.record import GROUPS
from pefll.training.callbacks import ActiveRun, Callback, Row


class Logger(Callback):
    """Sends figures such as `validation/seen/per_sample`. A subclass defines `open`, `write` and `finish`.

    If opening fails, the run does not start. If writing fails later, for example because a disk is full, the logger
    gives a warning and stops, and the run goes on.
    """

    def __init__(self) -> None:
        self._writers: dict[ActiveRun, Any] = {}

    def open(self, run: ActiveRun) -> Any:
        """Return a writer for a run that starts or resumes."""
        raise NotImplementedError

    def write(self, writer: Any, figures: dict[str, float], round_: int) -> None:
        """Write the figures of an evaluation after a round."""
        raise NotImplementedError

    def finish(self, writer: Any) -> None:
        """Close a writer."""
        raise NotImplementedError

    def on_start(self, run: ActiveRun) -> None:
        """Open a writer."""
        self._writers[run] = self.open(run)

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Write the figures."""
        if run in self._writers:
            try:
                self.write(self._writers[run], figures_of(row), row["round"])
            except Exception as error:  # noqa: BLE001 - a logger must not end the run
                del self._writers[run]
                _tell(self, run, error)

    def on_end(self, run: ActiveRun) -> None:
        """Close the writer."""
        if run in self._writers:
            try:
                self.finish(self._writers.pop(run))
            except Exception as error:  # noqa: BLE001 - a logger must not end the run
                _tell(self, run, error)


def figures_of(row: Row) -> dict[str, float]:
    """Return the figures of an evaluation by name, such as `validation/unseen/loss`."""
    return {
        f"validation/{group}/{name}": value
        for group in GROUPS
        for name, value in (row[group] or {}).items()
        if value is not None  # not defined, such as an AUC without positive samples
    }


def settings_of(run: ActiveRun) -> dict[str, Any]:
    """Return the settings of a run as a flat table, for a tracker."""
    plain = dataclasses.asdict(run.spec.config)
    settings = plain.pop("settings")
    return plain | {f"settings/{name}": value for name, value in settings.items()}


def tracked_name(run: ActiveRun) -> str:
    """Return a run's name in a tracker. A run with a folder has the same name when it is resumed."""
    folder = run.spec.folder
    return f"{run.spec.title} {folder.run_id()[:8]}" if folder and folder.run_id() else run.spec.title


def package(name: str, what: str) -> Any:
    """Import and return a logger's package; PefllError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PefllError(f"{what} needs the {name} package: pip install {name}", code="PEFLL-T551") from error


def _tell(logger: Logger, run: ActiveRun, error: Exception) -> None:
    why = str(error.args[0]) if isinstance(error, PefllError) else f"{type(error).__name__}: {first_line(error)}"
    name = type(logger).__name__
    run.tell(f"{run.spec.title}: {name} stopped after round {run.round}, and the run goes on: {why}")
