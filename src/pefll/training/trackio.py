"""A logger for trackio, which keeps experiments in a local database; it needs the `trackio` package."""

from __future__ import annotations

from contextvars import Context
from typing import Any

from pefll.core import arguments
from pefll.training.callbacks import ActiveRun
from pefll.training.logger import Logger, package, settings_of, tracked_name


class Trackio(Logger):
    """Sends settings and evaluations to trackio, on this machine; `trackio show` shows them.

    Args:
        project: name of the project in trackio.

    Raises:
        PefllError: if the package is not installed.
    """

    def __init__(self, project: str = "pefll") -> None:
        super().__init__()
        self._project = arguments.text(project, "project")
        self._trackio = package("trackio", "Trackio")

    def open(self, run: ActiveRun) -> Any:
        """Begin a run of trackio, or go on with it."""
        name, resume = tracked_name(run), "allow" if run.spec.folder else "never"
        # In a context of its own, because trackio ends the run of the context that it begins another one in.
        return Context().run(
            self._trackio.init, project=self._project, name=name, config=settings_of(run), resume=resume
        )

    def write(self, writer: Any, figures: dict[str, float], round_: int) -> None:
        """Send the figures."""
        writer.log(figures, step=round_)

    def finish(self, writer: Any) -> None:
        """End the run of trackio."""
        writer.finish()
