"""A run is a folder: config.toml, history.jsonl, summary.json, descriptors.npz, checkpoints/."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pefll.core import locking
from pefll.core.errors import PefllError
from pefll.core.files import (
    open_limited,
    parse_json,
    read_json,
    read_limited,
    sentences_for_disk_errors,
    set_aside,
    sweep,
    sync_folder,
    write_json,
    write_whole,
)
from pefll.core.warning import warn
from pefll.core.wording import all_harmless, counted, either, first_few
from pefll.runs import manifest
from pefll.runs.checksums import CHECK, Rows, checked_line, digest, last_check, read_first_line, read_rows
from pefll.runs.config import MOST_BYTES as MOST_SETTINGS

LOCK = ".lock"  # a process that trains into the folder holds a lock on this file
# Incomplete files of killed writers of earlier versions.
_HALF_WRITTEN = re.compile(r"\.(config\.toml|history\.jsonl|summary\.json|descriptors\.npz)\.[0-9]+\.tmp")
GROUPS = ("seen", "unseen")
CERTIFICATE = "certificate"  # the entry of a summary that `pefll certify` writes
# `timing` in a summary begins with one of these if no other run slowed this one down.
ALONE, TOOK_TURNS = "alone", "took turns"
MEASURES = ("per_sample", "per_client", "masked", "worst_tenth")
OVER_CLIENTS = ("per_client", "worst_tenth")  # made from the metric that chooses the best round
# Metrics of this package that are shares. These are shown in per cent, and so are the `shares` that a summary names.
SHARES = ("per_sample", "masked", "accuracy", "macro_f1", "micro_f1", "auc", "calibration_error")
# Metrics of this package that are better when smaller.
ERRORS = ("loss", "rmse", "mae", "calibration_error")
# What samples must have, so that metrics of this package have a value.
UNDEFINED = dict.fromkeys(("macro_f1", "micro_f1"), "needs a positive label or prediction") | {
    "auc": "needs positive and negative labels",
    "r2": "needs labels that differ",
}
_WORDS = {"per_sample": "accuracy", "rmse": "RMSE", "mae": "MAE", "r2": "R²", "auc": "AUC"}
# Most bytes of each file; longer files are not read. A history may have two million evaluations of 400 bytes.
MOST_HISTORY = 1 << 30
# A summary has 3,000 bytes, and 30 more for each of at most 10,000 clients.
MOST_SUMMARY = 1 << 25
# At most 10,000 clients have descriptors in the file, so each client may have 100,000 bytes.
MOST_DESCRIPTORS = 1 << 30


@dataclass(frozen=True)
class RunFolder:
    """The files of the run in the folder `path`."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The settings as TOML."""
        return self.path / "config.toml"

    @property
    def history_file(self) -> Path:
        """One JSON line per evaluation."""
        return self.path / "history.jsonl"

    @property
    def summary_file(self) -> Path:
        """The results of a finished run."""
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
    def columns_file(self) -> Path:
        """What was done to each column of a table, and its labels, as JSON; absent for other data."""
        return self.path / "columns.json"

    def write_columns(self, rows: list[dict[str, Any]]) -> None:
        """Write what was done to each column of a table."""
        write_json(self.columns_file, {"columns": rows})

    def columns(self) -> list[dict[str, Any]]:
        """Return what was done to each column of a table; [] if the run has no table, PefllError for damage."""
        if not os.path.lexists(self.columns_file):
            return []
        content = read_json(self.columns_file, MOST_SUMMARY)
        rows = content.get("columns") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise PefllError(f"{self.columns_file} is damaged: it has no list of columns; remove it", "PEFLL-R581")
        found: list[dict[str, Any]] = all_harmless(rows)
        return found

    @property
    def earlier_summary_file(self) -> Path:
        """The results of a run that is being extended, until the longer run is finished."""
        return self.path / "summary.before.json"

    @property
    def going_on(self) -> str:
        """The command or call that continues the run."""
        return either(f"`pefll train --resume {self.path}`", f"pefll.fit(federation, ..., out={str(self.path)!r})")

    @property
    def go_on(self) -> str:
        """Advice for a user after correcting a disk error."""
        return f"go on from the last checkpoint, if there is one, with {self.going_on}"

    def check_is_run(self) -> None:
        """Raise PefllError if this is not a run folder, or if it holds a pipe or a device."""
        if self.config_file.is_file():
            self._check_ordinary()
            return
        if seeds := _of_seeds(self.path):
            raise PefllError(
                f"{self.path} holds runs of several seeds; name one of them, such as {seeds[0].path}", code="PEFLL-R118"
            )
        if inside := sorted(self.path.glob("*/config.toml")):
            raise PefllError(
                f"{self.path} is not a run folder, but holds run folders; name one, such as {inside[0].parent}",
                code="PEFLL-R119",
            )
        reason = "it has no config.toml" if self.path.is_dir() else "there is no such folder"
        make = either("`pefll train --out FOLDER`", "pefll.fit(federation, out=...)")
        raise PefllError(f"{self.path} is not a run folder: {reason}; {make} makes one", code="PEFLL-R120")

    def _check_ordinary(self) -> None:
        """Raise PefllError if there is a pipe or a device in the folder: reading it might never end."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                place = Path(folder) / name
                if place.exists() and not place.is_file():
                    raise PefllError(f"{place} is a pipe or a device, not a file; remove it", code="PEFLL-R017")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder and lock it inside the block; PefllError if another process has locked it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PefllError(
                f"cannot make the folder {self.path}: {error.strerror}; choose another place", code="PEFLL-R121"
            ) from error
        lock = self.path / LOCK
        with sentences_for_disk_errors(str(lock)):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | locking.PRIVATE, 0o666)
        try:
            _lock(handle, self.path)
            self._check_ordinary()
            sweep(self.path, _HALF_WRITTEN)
            yield
        finally:
            with suppress(OSError):  # closing is not enough: forked processes may have copies of the handle
                locking.unlock(handle)
            os.close(handle)
            if not self.config_file.exists():  # the run did not start
                with suppress(OSError):
                    lock.unlink()
                    self.path.rmdir()

    def is_untrained(self) -> bool:
        """Return whether it has no round in a checkpoint, no evaluation and no result: nothing is lost with its run."""
        results = (self.history_file, self.summary_file, self.earlier_summary_file, self.descriptors_file)
        begun = manifest.folder_of(self.checkpoints, 0)
        saved = any(path != begun for path in manifest.newest_first(self.checkpoints))
        return not saved and not any(map(os.path.lexists, results))

    def forget_untrained(self) -> None:
        """Remove the settings of a run that failed before its first checkpoint, if the folder holds nothing else."""
        own = (self.config_file, self.columns_file)
        if not self.is_untrained() or not self.path.is_dir():
            return
        with suppress(OSError):
            self.checkpoints.rmdir()
        with suppress(OSError):
            if {each.name for each in self.path.iterdir()} <= {LOCK, *(each.name for each in own)}:
                for each in own:
                    each.unlink(missing_ok=True)

    def run_id(self) -> str:
        """Return the run's ID, which its files carry; empty for a run of an earlier version, or without a run."""
        with suppress(OSError, ValueError):
            run, _ = read_first_line(read_limited(self.config_file, MOST_SETTINGS).decode())
            if run:
                return run
        return self._newest_checkpoint().get("id", "")

    def trained_with(self) -> str:
        """Return the settings in the newest checkpoint, as TOML; empty without a checkpoint."""
        # If no checkpoint belongs to the run in config.toml, any other checkpoint shows what differs.
        return (self._newest_checkpoint(self.run_id()) or self._newest_checkpoint()).get("config", "")

    def note_of_age(self) -> str:
        """Return a note for a run of an earlier version, whose files carry no checks; else an empty text."""
        if self.run_id() or not self.config_file.is_file():
            return ""
        return f"{self.path} was written by an earlier version: its files carry no checks, so damage may go unnoticed"

    def _newest_checkpoint(self, run: str = "") -> dict[str, str]:
        found = manifest.newest(self.checkpoints, run)
        return found.run if found else {}

    def history(self) -> list[dict[str, Any]]:
        """Return the evaluations so far, oldest first, without an incomplete last line; PefllError if damaged."""
        found = self._read_history()
        if found.damage:
            raise PefllError(
                f"{self.history_file} is damaged: {found.damage}; {self.going_on} restores it from the last checkpoint",
                code="PEFLL-R008",
            )
        return found.rows

    def _read_history(self) -> Rows:
        """Return the evaluations before the first damaged one, and the damage."""
        run = self.run_id()
        try:
            found = read_rows(read_limited(self.history_file, MOST_HISTORY), run)
        except FileNotFoundError:
            found = Rows([], [], [], "it is a link to nowhere" if os.path.lexists(self.history_file) else "")
        except OSError as error:
            found = Rows([], [], [], f"it cannot be read ({error.strerror})")
        except ValueError as error:
            found = Rows([], [], [], str(error))
        if found.damage or not run:
            return found
        saved = self._newest_checkpoint(run).get("history", "")
        if saved and saved not in found.checks:
            return found._replace(damage="evaluations before the newest checkpoint are missing")
        last = self._summary_check().get("history")
        if last is not None and last != found.last_check:
            return found._replace(damage="its last line does not match summary.json")
        return found

    def history_to_keep(self, eval_every: int) -> tuple[bytes, str]:
        """Return the content of history.jsonl, and the check of the last evaluation due by `eval_every`."""
        found = self._read_history()
        pairs = zip(found.rows, found.checks, strict=True)
        scheduled = [check for row, check in pairs if row["round"] % eval_every == 0]
        return b"".join(found.lines), scheduled[-1] if scheduled else ""

    def append_history(self, row: dict[str, Any]) -> None:
        """Add one evaluation; it is on disk only after `sync_history`."""
        run = self.run_id()
        line = checked_line(row, last_check(self.history_file) if run else "", run)
        with sentences_for_disk_errors(str(self.history_file), self.go_on), self.history_file.open("ab") as file:
            file.write(line)

    def sync_history(self) -> None:
        """Wait until the evaluations are on disk."""
        if not self.history_file.is_file():
            return
        with sentences_for_disk_errors(str(self.history_file), self.go_on), self.history_file.open("a") as file:
            os.fsync(file.fileno())
            sync_folder(self.path)

    def keep_history_until(
        self, round_: int, copy: bytes | None = None, report: Callable[[str], None] = lambda sentence: None
    ) -> list[dict[str, Any]]:
        """Remove the evaluations after a round, because a resumed run repeats them; return the others.

        A damaged file is renamed, and its evaluations are restored from the checkpoint.

        Args:
            round_: the round from which the run continues.
            copy: the checkpoint's copy of the file; None if it has none.
            report: gets a sentence about damage.
        """
        run, found = self.run_id(), self._read_history()
        if not found.damage and not os.path.lexists(self.history_file):
            return []
        if found.damage:
            kept = set_aside(self.history_file).name if os.path.lexists(self.history_file) else "nothing"
            damage, found = found.damage, found if copy is None else read_rows(copy, run)
            count = counted(sum(row["round"] <= round_ for row in found.rows), "evaluation")
            report(f"{self.history_file} is damaged: {damage}; it is kept as {kept}, and {count} of it are restored")
        kept_rows = [pair for pair in zip(found.rows, found.lines, strict=True) if pair[0]["round"] <= round_]
        write_whole(self.history_file, b"".join(line for _, line in kept_rows))
        return [row for row, _ in kept_rows]

    def give_checks(self, run: str) -> None:
        """Add checks to the history and the summary that an earlier version wrote, unless they are damaged.

        The caller writes the run's new ID into config.toml afterwards.
        """
        found = self._read_history()
        if found.rows and not found.damage:
            content, before = b"", ""
            for row in found.rows:
                line = checked_line(row, before, run)
                content, before = content + line, str(parse_json(line)[CHECK])
            write_whole(self.history_file, content)
        with suppress(PefllError):
            if (summary := self.summary()) is not None:
                self.write_summary(summary, run)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary, or None while the run is not finished; PefllError if it is damaged or of another run."""
        return self._read_summary()[0]

    def _read_summary(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the summary without its check, and the check, which has hashes of other files."""
        if not os.path.lexists(self.summary_file):
            return None, {}
        advice = f"move it away, and {self.going_on} makes it again"
        try:
            summary: Any = read_json(self.summary_file, MOST_SUMMARY)
        except PefllError as error:
            raise PefllError(f"{error.args[0]}; {advice}", code="PEFLL-R009") from error
        if not isinstance(summary, dict):
            raise PefllError(f"{self.summary_file} is damaged: it must hold a JSON object; {advice}", code="PEFLL-R009")
        run, check = self.run_id(), summary.pop(CHECK, None)
        if not run:
            return summary, check if isinstance(check, dict) else {}
        if not isinstance(check, dict) or check.pop("sha256", "") != digest([summary, check]):
            raise PefllError(f"{self.summary_file} is damaged: it is not what was written; {advice}", code="PEFLL-R009")
        if check.get("run") != run:
            raise PefllError(f"{self.summary_file} is from another run than config.toml; {advice}", code="PEFLL-R010")
        return summary, check

    def _summary_check(self) -> dict[str, Any]:
        """Return the summary's check; {} if the summary is missing or damaged."""
        with suppress(PefllError):
            return self._read_summary()[1]
        return {}

    def check_other_files(self) -> None:
        """Raise PefllError if a file that the summary checks is missing or damaged."""
        for name, wanted in self._checked_files().items():
            path, reason = self.path / name, "is damaged: its SHA-256 is wrong"
            try:
                if path != self.descriptors_file:  # a stranger's summary may name any file
                    reason = "is no file of a run, but summary.json names it"
                elif _hash_of(path) == wanted:
                    continue
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
            except ValueError as error:
                reason = f"is damaged: {error}"
            raise PefllError(
                f"{path} {reason}; put it back, or move summary.json away, and {self.going_on} makes both again",
                code="PEFLL-R011",
            )

    def _checked_files(self) -> dict[str, str]:
        """Return the SHA-256 of other files that the summary checks, by name."""
        files = self._summary_check().get("files")
        return files if isinstance(files, dict) else {}

    def are_own_descriptors(self) -> bool | None:
        """Return whether descriptors.npz has the hash in the summary; None if the summary has no hashes."""
        if "files" not in self._summary_check():
            return None
        with suppress(OSError, ValueError):
            return _hash_of(self.descriptors_file) == self._checked_files().get(self.descriptors_file.name)
        return False

    def write_summary(self, summary: dict[str, Any], run: str = "") -> None:
        """Write the summary, with a check of itself, of the history and of the descriptors."""
        run = run or self.run_id()
        if run:
            others = [self.descriptors_file] if self.descriptors_file.is_file() else []
            check = {
                "run": run,
                "history": self._read_history().last_check,
                "files": {path.name: _hash_of(path) for path in others},
            }
            summary = parse_json(json.dumps(summary).encode())  # tuples become lists, as in the file
            summary = summary | {CHECK: check | {"sha256": digest([summary, check])}}
        write_json(self.summary_file, summary)
        self.earlier_summary_file.unlink(missing_ok=True)

    def set_results_aside(self, report: Callable[[str], None]) -> None:
        """Rename the results of a run that starts anew, because its checkpoints are gone."""
        results = (self.history_file, self.summary_file, self.earlier_summary_file, self.descriptors_file)
        if self._read_history().rows or any(map(os.path.lexists, results[1:])):
            kept = [set_aside(path, "earlier").name for path in results if os.path.lexists(path)]
            report(f"{self.path} has no checkpoint: the run starts anew, and its results are kept as {first_few(kept)}")

    def put_summary_away(self, report: Callable[[str], None]) -> None:
        """Rename the summary of a run that continues, until `write_summary` replaces it. A damaged summary is kept."""
        if not os.path.lexists(self.summary_file):
            return
        try:
            self.summary()
        except PefllError as error:
            report(f"{error.args[0]}; it is kept as {set_aside(self.summary_file).name}")
            return
        with sentences_for_disk_errors(str(self.summary_file), self.go_on):
            os.replace(self.summary_file, self.earlier_summary_file)


def _hash_of(descriptors: Path) -> str:
    with open_limited(descriptors, MOST_DESCRIPTORS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_figure(figures: Mapping[str, Any], shares: Collection[str] = ()) -> str:
    """Return the metric that chooses the best round, which is the first one, as text: `"97.4%"` or `"rmse 53.1"`."""
    name = next(iter(figures))
    text = figure_text(figures, name, shares)
    return text if name in ("per_sample", "accuracy") else f"{name} {text}"


def figure_text(figures: Mapping[str, Any], name: str, shares: Collection[str] = ()) -> str:
    """Return a metric of a group of clients as text: shares in per cent, others with four digits.

    `shares` are the names of a user's metrics that are shares.
    """
    value, first = figures.get(name), next(iter(figures), "")
    if value is None:
        return "—"
    return f"{100 * value:.1f}%" if is_share(name, first, shares) else f"{value:.4g}"


def is_share(name: str, first: str, shares: Collection[str] = ()) -> bool:
    """Return whether a metric is shown in per cent: it is one of `SHARES`, or of the user's `shares`.

    Means over clients are like the `first` metric of the group.
    """
    return behind(name, first) in (*SHARES, *shares)


def is_error(name: str, first: str, errors: Collection[str] = ()) -> bool:
    """Return whether a metric is better when smaller: it is one of `ERRORS`, or of the user's `errors`."""
    return behind(name, first) in (*ERRORS, *errors)


def behind(name: str, first: str) -> str:
    """Return the metric that a figure is made from: means over clients are made from the `first` one of the group."""
    return first if name in OVER_CLIENTS else name


def meant(name: str, known: Collection[str]) -> str:
    """Return the metric that a user means: in classification, the accuracy is called `per_sample` in records."""
    return "per_sample" if name == "accuracy" and name not in known and "per_sample" in known else name


def metric_word(name: str) -> str:
    """Return the name of a metric in sentences, such as `"accuracy"` for per_sample, `"RMSE"` and `"micro F1"`."""
    return _WORDS.get(name, name.replace("_f1", " F1").replace("_", " "))


def figures_in(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the test metrics of a summary by moment, group and name; classification calls them `accuracy`."""
    found = (summary or {}).get("metrics", (summary or {}).get("accuracy"))
    return found if isinstance(found, dict) else {}


def headline_of(summary: Mapping[str, Any] | None) -> str | None:
    """Return the first line of a summary's certificate; None without one."""
    found = (summary or {}).get(CERTIFICATE)
    headline = found.get("headline") if isinstance(found, dict) else None
    return headline if isinstance(headline, str) else None


def rounds_of(summary: Mapping[str, Any] | None) -> int:
    """Return the rounds of a finished run; -1 without a summary, or if it does not say."""
    rounds = (summary or {}).get("rounds")
    return rounds if type(rounds) is int else -1


def last_round(summary: Mapping[str, Any] | None, rounds: int) -> int:
    """Return the last round of a run: `rounds`, or the round at which a callback stopped it.

    A stopped run that is given more rounds than before continues up to `rounds`.
    """
    stopped = (summary or {}).get("stopped")
    asked = stopped.get("rounds") if isinstance(stopped, dict) else None
    return min(rounds, rounds_of(summary)) if type(asked) is int and rounds <= asked else rounds


def own_seconds(summary: Mapping[str, Any]) -> bool:
    """Return whether `timing` in a summary says that no other run slowed this one down."""
    return str(summary.get("timing", "")).startswith((ALONE, TOOK_TURNS))


def _lock(handle: int, path: Path) -> None:
    """Lock an open file until it is closed or the process ends; PefllError if another process has locked it."""
    try:
        locking.lock(handle, wait=False)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            warn(f"{path} lies on a file system without locks: make sure that only one process trains into it")
            return
        raise PefllError(
            f"{path} is being trained already; wait for it, or stop it with Ctrl-C first", code="PEFLL-R122"
        ) from error


def seed_folder(path: Path, seed: int) -> Path:
    """Return the folder of one of several seeds that are trained into `path`."""
    return path / f"seed-{seed}"


def run_folders(path: Path) -> list[RunFolder]:
    """Return the run in a folder, or the runs of all seeds that were trained into it."""
    folder = RunFolder(path)
    return [folder] if folder.config_file.is_file() else _of_seeds(path) or [folder]


def runs_below(path: Path) -> list[RunFolder]:
    """Return the run in a folder, or all runs in it and in its subfolders, sorted by their paths."""
    own = run_folders(path)
    if own[0].config_file.is_file():
        return own
    found: list[RunFolder] = []
    for folder, below, _ in os.walk(path):
        inside = sorted(name for name in below if not name.startswith("."))
        runs = [] if folder == str(path) else [run for run in run_folders(Path(folder)) if run.config_file.is_file()]
        found += runs
        below[:] = [] if runs else inside
    return found or own


def _of_seeds(path: Path) -> list[RunFolder]:
    """Return the runs in the folders `seed-N` of a folder, ordered by seed."""
    below = [RunFolder(each) for each in path.glob("seed-*") if each.name[5:].isdecimal()]
    found = sorted((run for run in below if run.config_file.is_file()), key=lambda run: int(run.path.name[5:]))
    for folder in found:
        _check_seed(folder)
    return found


def _check_seed(folder: RunFolder) -> None:
    """Raise PefllError if the folder of a seed holds the run of another seed; damaged settings are not reported."""
    try:
        seed = tomllib.loads(read_limited(folder.config_file, MOST_SETTINGS).decode()).get("seed")
    except (OSError, ValueError, RecursionError):
        return
    if type(seed) is int and seed != int(folder.path.name[5:]):
        raise PefllError(
            f"{folder.path} holds the run of seed {seed}: folders were renamed or exchanged; call it seed-{seed}",
            code="PEFLL-R013",
        )
