"""A logger that writes TensorBoard's events; it needs the `tensorboard` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.files import safe_file_name, sentences_for_disk_errors
from pefll.training.callbacks import ActiveRun
from pefll.training.logger import Logger


class TensorBoard(Logger):
    """Writes evaluations as TensorBoard's events, such as `validation/seen/per_sample`.

    A resumed run writes a second file in the same folder; TensorBoard shows both as one run.

    Args:
        folder: a folder for the events, with a subfolder for each run; None to write into each run's folder.

    Raises:
        PefllError: if the package is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self._folder = None if folder is None else arguments.path(folder, "folder")
        _writer_class()

    def open(self, run: ActiveRun) -> Any:
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
            return _writer_class()(str(place))

    def write(self, writer: Any, figures: dict[str, float], round_: int) -> None:
        """Append the figures; a running TensorBoard shows them at once."""
        with sentences_for_disk_errors("TensorBoard's events"):
            for name, value in figures.items():
                writer.add_scalar(name, value, round_)
            writer.flush()

    def finish(self, writer: Any) -> None:
        """Close the file."""
        writer.close()


def _writer_class() -> Any:
    """Return torch's writer of events; PefllError if the package that it needs is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PefllError(
            "TensorBoard's events need the tensorboard package: pip install tensorboard", code="PEFLL-T130"
        ) from error
    return SummaryWriter
