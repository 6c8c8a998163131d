"""Reads run folders for reports."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError
from pefll.core.wording import all_harmless, counted, harmless
from pefll.runs.config import OF_TABLES, Config, read_settings
from pefll.runs.fingerprints import differing_part
from pefll.runs.record import GROUPS, RunFolder, figures_in, is_error, is_share

Array = npt.NDArray[Any]

_LARGEST = sys.float_info.max
MISSING = "—"  # stands for a value that a run does not have

# These settings and the seed decide the partition.
_DATA = ("data", "partition", "clients", "unseen", "label", "client_column")
OF_DATA = (*_DATA, *(name for name in OF_TABLES if name != "encode"))  # an encoded table shows in the fingerprint
DEFAULTS = {each.name: each.default for each in fields(Config)}
_NAME_IN_CONFIG = {"dataset": "data", "num_clients": "clients"}


@dataclass(frozen=True)
class StoredRun:
    """The content of a run folder."""

    folder: RunFolder
    config: dict[str, Any]
    history: list[dict[str, Any]]  # one row per evaluation, oldest first
    summary: dict[str, Any] | None  # None while the run is not finished

    @property
    def name(self) -> str:
        """The folder's name."""
        return harmless(self.folder.path.resolve().name)

    @property
    def finished(self) -> bool:
        """Whether there is a summary."""
        return self.summary is not None

    def value(self, key: str) -> Any:
        """Return a value of the summary, else of the config, else None."""
        if self.summary is not None and self.summary.get(key) is not None:
            return self.summary[key]
        value = self.config.get(_NAME_IN_CONFIG.get(key, key))
        decided_by_data = value == "" or (key == "num_clients" and value == 0)
        return None if decided_by_data else value

    def text(self, key: str) -> str:
        """Return a value as text, or an em dash."""
        value = self.value(key)
        return MISSING if value is None else str(value)

    def accuracy(self, moment: str, group: str, measure: str) -> float | None:
        """Return a test metric, such as an accuracy in 0..1, or None if the summary has none.

        The moment is `"best"` or `"final"`, the group `"seen"` or `"unseen"`, the measure a metric of the task; for
        classification, one of `record.MEASURES`.
        """
        value: Any = figures_in(self.summary)
        for key in (moment, group, measure):
            value = value.get(key) if isinstance(value, dict) else None
        return number(value)

    @property
    def metric(self) -> str:
        """The metric that chooses the best round: the first one in the history or the summary."""
        groups = [row.get(group) for row in self.history for group in GROUPS]
        best = figures_in(self.summary).get("best")
        groups += list(best.values()) if isinstance(best, dict) else []
        return next((next(iter(each)) for each in groups if isinstance(each, dict) and each), "per_sample")

    def has_share(self, measure: str) -> bool:
        """Return whether a measure is a share, such as an accuracy, by the summary or by its name."""
        return is_share(measure, self.metric, self._names("shares"))

    def has_error(self, measure: str) -> bool:
        """Return whether a measure is better when smaller, by the summary or by its name."""
        return is_error(measure, self.metric, self._names("errors"))

    def _names(self, key: str) -> list[str]:
        found = (self.summary or {}).get(key)
        return [str(name) for name in found] if isinstance(found, list) else []

    def validation(self, group: str, measure: str) -> Array:
        """Return a validation measure at each evaluation, float64 [evaluations]; NaN for a missing value."""
        values = [number((row.get(group) or {}).get(measure)) for row in self.history]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    @property
    def rounds(self) -> Array:
        """The round of each evaluation, int64 [evaluations]."""
        return np.array([row["round"] for row in self.history], dtype=np.int64)

    @property
    def megabytes(self) -> Array:
        """Megabytes sent in both directions up to each evaluation, float64 [evaluations]."""
        sent = [(number(row.get("bytes_down")) or 0) + (number(row.get("bytes_up")) or 0) for row in self.history]
        return np.array(sent, dtype=np.float64) / 1e6

    @property
    def best_round(self) -> int | None:
        """The round with the best validation metric on seen clients, from the summary, else from the history."""
        best = number(self.value("best_round"))
        if best is not None:
            return int(best)
        values = self.validation("seen", self.metric)
        if np.isnan(values).all():
            return None
        smaller = self.has_error(self.metric)
        return int(self.rounds[np.nanargmin(values) if smaller else np.nanargmax(values)])


def number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def read_run(folder: RunFolder) -> StoredRun:
    """Return the content of a run folder; PefllError if it is no run folder or is damaged."""
    folder.check_is_run()
    config = read_settings(folder.config_file, folder.trained_with())
    # Only for people: the checks above were made with the texts as they are.
    texts = {"config": config, "history": _read_history(folder), "summary": folder.summary()}
    run = StoredRun(folder, **all_harmless(texts))
    folder.check_other_files()
    return run


def run_in_memory(config: Any, history: Sequence[Any], summary: Mapping[str, Any], name: str = "run") -> StoredRun:
    """Return a run that was trained in Python as one from a folder; without a summary, it is not finished."""
    content = json.dumps({"history": list(history), "summary": dict(summary) or None})
    texts = {"config": asdict(config), **json.loads(content)}  # tuples become lists, as in the files
    return StoredRun(RunFolder(Path(name)), **all_harmless(texts))


def read_runs(folders: Sequence[RunFolder]) -> list[StoredRun]:
    """Return the contents of run folders; a folder given twice counts once."""
    unique: dict[Path, RunFolder] = {}
    for folder in folders:
        unique.setdefault(folder.path.resolve(), folder)
    return [read_run(folder) for folder in unique.values()]


def _read_history(folder: RunFolder) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for line, row in enumerate(folder.history(), start=1):
        if not all(isinstance(row.get(group) or {}, dict) for group in GROUPS):
            raise PefllError(f"{folder.history_file} is damaged: line {line} is not an evaluation", code="PEFLL-O010")
        # A run that crashed before its first checkpoint has started again and repeated its evaluations.
        while kept and kept[-1]["round"] >= row["round"]:
            kept.pop()
        kept.append(row)
    return kept


def in_per_cent(runs: Sequence[StoredRun], measure: str = "") -> bool:
    """Return whether a measure of runs, by default their first metric, is shown in per cent: if it is a share in one.

    An unfinished run does not know which metrics of the user are shares.
    """
    return any(run.has_share(measure or run.metric) for run in runs)


def same_code(run: StoredRun, other: StoredRun) -> bool:
    """Return whether nothing shows that two runs had other networks, losses, metrics or schedules of the same names."""
    return not differing_part(*((one.summary or {}).get("fingerprints") for one in (run, other)))


def same_metric(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Return the runs in groups with the same metric, in the order of their first run."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.metric, []).append(run)
    return list(groups.values())


def different_data(runs: Sequence[StoredRun]) -> list[str]:
    """Return a description of each federation that the runs used; empty if all runs used the same one."""
    firsts: list[StoredRun] = []
    for run in runs:
        if not any(same_data(run, first) for first in firsts):
            firsts.append(run)
    if len(firsts) < 2:
        return []
    descriptions = [describe_data(run) for run in firsts]
    distinct = len(set(descriptions)) == len(descriptions)
    return descriptions if distinct else [run.name for run in firsts]


def same_data(run: StoredRun, other: StoredRun) -> bool:
    """Return whether two runs have the same clients and samples, or would have them if their seeds were equal."""
    fingerprints = [one.config.get("data_sha256") for one in (run, other)]
    if fingerprints[0] == fingerprints[1] and fingerprints[0]:
        return True
    if all(fingerprints) and run.value("seed") == other.value("seed"):
        return False
    # Runs of earlier versions lack settings of tables, which then had the default.
    usual = {key: DEFAULTS[key] for key in OF_DATA if key not in _DATA}
    return all(run.config.get(key, usual.get(key)) == other.config.get(key, usual.get(key)) for key in OF_DATA)


def describe_data(run: StoredRun) -> str:
    """Return a run's data set, partition and number of clients, as far as they are known."""
    clients = number(run.value("num_clients"))
    parts = (run.value("dataset"), run.value("partition"), None if clients is None else counted(int(clients), "client"))
    return ", ".join(str(part) for part in parts if part is not None)


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (n - 1); None as the deviation of one value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def mean_std_text(values: Sequence[float], per_cent: bool = True) -> str:
    """Return `mean ± standard deviation`; only the mean for one value, an em dash for no value.

    Per cent have one digit after the point. Other metrics have three digits, and as many after the point in the
    deviation as in the mean.
    """
    if not values:
        return MISSING
    mean, std = mean_and_std(values)
    digits = 1 if per_cent else max(0, 3 - len(str(int(abs(mean)))) + (abs(mean) < 1))
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"
