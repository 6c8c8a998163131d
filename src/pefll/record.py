"""A run is a folder: config.toml, history.jsonl, summary.json, descriptors.npz, checkpoints/, TensorBoard's events."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pefll.errors import PefllError
from pefll.files import read_json, sentences_for_disk_errors, sync_folder, write_json, write_whole
from pefll.wording import either

LOCK = ".lock"  # the file in a run's folder that whoever trains into it holds
GROUPS = ("seen", "unseen")
# How `timing` in a summary, which tells readers what its seconds are, says that they are the run's own.
ALONE, TOOK_TURNS = "alone", "took turns"
MEASURES = ("per_sample", "per_client", "masked", "worst_tenth")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def config_file(self) -> Path:
        """What was asked for."""
        return self.path / "config.toml"

    @property
    def history_file(self) -> Path:
        """One JSON line per evaluation."""
        return self.path / "history.jsonl"

    @property
    def summary_file(self) -> Path:
        """What came out; there once the run is finished."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def descriptors_file(self) -> Path:
        """Arrays `descriptors` [n, l], `histograms` [n, classes] and `seen` [n] at the best round, as npz."""
        return self.path / "descriptors.npz"

    @property
    def going_on(self) -> str:
        """What to do to go on with the run, for sentences."""
        return either(f"`pefll train --resume {self.path}`", f"pefll.fit(federation, ..., out={str(self.path)!r})")

    @property
    def go_on(self) -> str:
        """What to do once the run's folder can be written again, for sentences."""
        return f"go on from the last checkpoint, if there is one, with {self.going_on}"

    def check_is_run(self) -> None:
        """Raise PefllError where the folder is not a run's."""
        if self.config_file.is_file():
            return
        seeds = _of_seeds(self.path)
        if seeds:
            raise PefllError(f"{self.path} holds runs of several seeds; name one of them, such as {seeds[0].path}")
        inside = sorted(self.path.glob("*/config.toml"))
        if inside:
            raise PefllError(f"{self.path} is not a run folder but holds some; name one, such as {inside[0].parent}")
        reason = "it has no config.toml" if self.path.is_dir() else "there is no such folder"
        make = either("`pefll train --out FOLDER`", "pefll.fit(federation, out=...)")
        raise PefllError(f"{self.path} is not a run folder: {reason}; {make} makes one")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder where there is none, and keep everybody else from training into it inside the block.

        Raises:
            PefllError: where somebody does so already, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PefllError(f"cannot make the folder {self.path}: {error.strerror}; choose another place") from error
        lock = self.path / LOCK
        with sentences_for_disk_errors(str(lock)):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT)
        try:
            _lock(handle, self.path)
            yield
        finally:
            with suppress(OSError):  # not only closed: processes that other threads have forked have copies of it
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
            if not self.config_file.exists():  # nothing came of it
                with suppress(OSError):
                    lock.unlink()
                    self.path.rmdir()

    def history(self) -> list[dict[str, Any]]:
        """Return the evaluations so far, oldest first; a line cut off by a crash is left out."""
        if not self.history_file.is_file():
            return []
        rows = []
        for line in self.history_file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def append_history(self, row: dict[str, Any]) -> None:
        """Add one evaluation; others can read it at once, but it lasts only after `sync_history`."""
        with sentences_for_disk_errors(str(self.history_file), self.go_on), self.history_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def sync_history(self) -> None:
        """Wait until the evaluations so far are on the disk; where it is busy with a checkpoint, that takes long."""
        if not self.history_file.is_file():
            return
        with sentences_for_disk_errors(str(self.history_file), self.go_on), self.history_file.open("a") as file:
            os.fsync(file.fileno())
            sync_folder(self.path)

    def keep_history_until(self, round_: int) -> None:
        """Drop evaluations after a round: a resumed run makes them again."""
        if not self.history_file.is_file():
            return
        rows = [row for row in self.history() if row["round"] <= round_]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_whole(self.history_file, text.encode())

    def summary(self) -> dict[str, Any] | None:
        """Return the summary, or None while the run is not finished."""
        if not self.summary_file.is_file():
            return None
        advice = f"remove it, and {self.going_on} makes it again"
        try:
            summary: Any = read_json(self.summary_file)
        except PefllError as error:
            raise PefllError(f"{error}; {advice}") from error
        if not isinstance(summary, dict):
            raise PefllError(f"{self.summary_file} is damaged: it must hold a JSON object; {advice}")
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        write_json(self.summary_file, summary)


def own_seconds(summary: Mapping[str, Any]) -> bool:
    """Return whether the seconds in a summary are the run's own; False where others slowed it down, or nobody knows."""
    return str(summary.get("timing", "")).startswith((ALONE, TOOK_TURNS))


def _lock(handle: int, path: Path) -> None:
    """Lock an open file, until it is closed or the process ends, however it ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            warnings.warn(
                f"{path} lies on a file system without locks: make sure that only one process trains into it",
                stacklevel=2,
            )
            return
        raise PefllError(f"{path} is being trained already; wait for it, or stop it with Ctrl-C first") from error


def seed_folder(path: Path, seed: int) -> Path:
    """Return the folder of one seed, among those of several that were trained together into `path`."""
    return path / f"seed-{seed}"


def run_folders(path: Path) -> list[RunFolder]:
    """Return the run in a folder, or all runs of several seeds that were trained together into it."""
    folder = RunFolder(path)
    return [folder] if folder.config_file.is_file() else _of_seeds(path) or [folder]


def _of_seeds(path: Path) -> list[RunFolder]:
    """Return the runs of several seeds below a folder, in the order of the seeds."""
    names = [
        below for below in path.glob("seed-*") if below.name[5:].isdecimal() and RunFolder(below).config_file.is_file()
    ]
    return [RunFolder(below) for below in sorted(names, key=lambda below: int(below.name[5:]))]
