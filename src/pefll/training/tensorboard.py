"""A callback that writes TensorBoard's events; it needs the `tensorboard` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.files import safe_file_name, sentences_for_disk_errors
from pefll.runs.record import GROUPS
from pefll.training.callbacks import ActiveRun, Callback, Row


class TensorBoard(Callback):
    """Writes evaluations as TensorBoard's events, such as `validation/seen/per_sample`.

    A resumed run writes a second file in the same folder; TensorBoard shows both as one run.

    Args:
        folder: a folder for the events, with a subfolder for each run; None to write into each run's folder.

    Raises:
        PefllError: if the package is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else arguments.path(folder, "folder")
        self._writers: dict[ActiveRun, Any] = {}
        _writer_class()

    def on_start(self, run: ActiveRun) -> None:
        """Open a file."""
        if self._folder is None and run.spec.folder is None:
            raise PefllError(
                "TensorBoard's events need a folder: give the run a folder with out=..., or name one, for example "
                "pefll.TensorBoard('events')",
                code="PEFLL-T129",
            )
        title = safe_file_name(run.spec.title.replace(" ", "-"))
        place = run.spec.folder.path if run.spec.folder and not self._folder else Path(self._folder or "") / title
        with sentences_for_disk_errors(f"TensorBoard's events to {place}"):
            self._writers[run] = _writer_class()(str(place))

    def on_evaluation(self, run: ActiveRun, row: Row) -> None:
        """Append the figures; a running TensorBoard shows them at once."""
        writer = self._writers[run]
        with sentences_for_disk_errors("TensorBoard's events"):
            for group in GROUPS:
                for name, value in (row[group] or {}).items():
                    if value is not None:
                        writer.add_scalar(f"validation/{group}/{name}", value, row["round"])
            writer.flush()

    def on_end(self, run: ActiveRun) -> None:
        """Close the file."""
        if (writer := self._writers.pop(run, None)) is not None:
            writer.close()


def _writer_class() -> Any:
    """Return torch's writer of events; PefllError if the package that it needs is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PefllError(
            "TensorBoard's events need the tensorboard package: pip install 'pefll[tensorboard]'", code="PEFLL-T130"
        ) from error
    return SummaryWriter
