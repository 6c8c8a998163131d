"""A logger for Weights & Biases; it needs the `wandb` package."""

from __future__ import annotations

import os
from typing import Any

from pefll.core import arguments
from pefll.training.callbacks import ActiveRun
from pefll.training.logger import Logger, package, settings_of, tracked_name


class WandB(Logger):
    """Writes settings and evaluations for Weights & Biases, offline: into the run's folder, or the current folder.

    `wandb sync` uploads them later. With WANDB_MODE=online in the environment, they are uploaded during training.

    Args:
        project: name of the project in Weights & Biases.

    Raises:
        PefllError: if the package is not installed.
    """

    def __init__(self, project: str = "pefll") -> None:
        super().__init__()
        self._project = arguments.text(project, "project")
        self._wandb = package("wandb", "WandB")

    def open(self, run: ActiveRun) -> Any:
        """Begin a run of Weights & Biases; runs that train at once have one each."""
        folder = run.spec.folder
        return self._wandb.init(
            project=self._project,
            name=tracked_name(run),
            id=folder.run_id() if folder else None,
            dir=str(folder.path.absolute()) if folder else None,
            config=settings_of(run),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            resume="allow" if folder else None,
            settings={"silent": True, "console": "off"},
        )

    def write(self, writer: Any, figures: dict[str, float], round_: int) -> None:
        """Write the figures."""
        writer.log(figures, step=round_)

    def finish(self, writer: Any) -> None:
        """Close the run."""
        writer.finish()
