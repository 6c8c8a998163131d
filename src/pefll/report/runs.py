"""Reads run folders for reports, and groups runs that differ only by seed."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError
from pefll.core.wording import counted, first_few
from pefll.runs.config import MAY_CHANGE, OF_TABLES, Config, read_settings
from pefll.runs.fingerprints import differing_part
from pefll.runs.record import ERRORS, GROUPS, RunFolder, figures_in, is_share

Array = npt.NDArray[Any]

PLAIN = "classification"  # the task of a run whose settings name none
MISSING = "—"  # stands for a value that a run does not have

# Settings that may differ within a group. The seed decides the partition, so the data's fingerprint differs too. Runs
# with different numbers of rounds are different experiments, although a run may be extended.
_MAY_DIFFER = (MAY_CHANGE | {"seed", "data_sha256"}) - {"rounds"}
# These settings and the seed decide the partition.
_DATA = ("data", "partition", "clients", "unseen", "label", "client_column")
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
        return self.folder.path.resolve().name

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

    @property
    def in_per_cent(self) -> bool:
        """Whether this metric is shown in per cent."""
        return is_share(self.metric, self.metric)

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
        smaller = self.metric in ERRORS
        return int(self.rounds[np.nanargmin(values) if smaller else np.nanargmax(values)])


def number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_run(folder: RunFolder) -> StoredRun:
    """Return the content of a run folder; PefllError if it is no run folder or is damaged."""
    folder.check_is_run()
    config = read_settings(folder.config_file, folder.trained_with())
    run = StoredRun(folder, config, _read_history(folder), folder.summary())
    folder.check_other_files()
    return run


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


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only by seed."""

    label: str  # differs from the label of every other group
    runs: list[StoredRun]  # one per seed
    repeated: tuple[StoredRun, ...] = ()  # runs of seeds that are among `runs` already, which are left out


def group_runs(runs: Sequence[StoredRun]) -> list[SeedGroup]:
    """Group runs that differ only by seed, in the order of their first run; a repeated seed counts once."""
    members: dict[str, list[list[StoredRun]]] = {}
    groups: list[list[StoredRun]] = []
    repeated: dict[int, list[StoredRun]] = {}
    for run in runs:
        alike = members.setdefault(_identity(run), [])
        # Equal settings and seeds may still have different data, for example if a file has changed, or different code.
        same = next(
            (group for group in alike if all(same_data(run, other) and same_code(run, other) for other in group)), None
        )
        if same is None:
            alike.append([run])
            groups.append(alike[-1])
        elif run.value("seed") is None or run.value("seed") not in [other.value("seed") for other in same]:
            same.append(run)
        else:
            repeated.setdefault(id(same), []).append(run)
    labels = _labels([group[0] for group in groups])
    return [
        SeedGroup(label, group, tuple(repeated.get(id(group), ()))) for label, group in zip(labels, groups, strict=True)
    ]


def repeated_note(groups: Sequence[SeedGroup]) -> str:
    """Return a sentence that names the runs that groups leave out as repeated seeds; "" for none."""
    left_out = [run for group in groups for run in group.repeated]
    if not left_out:
        return ""
    return f"Left out, as the same settings and seed as another run: {first_few(names_of(left_out))}."


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
    same = all(run.config.get(key) == other.config.get(key) for key in _DATA)
    # Runs of earlier versions lack these settings, which then had the default.
    defaults = {each.name: each.default for each in fields(Config) if each.name in OF_TABLES and each.name != "encode"}
    return same and all(run.config.get(key, usual) == other.config.get(key, usual) for key, usual in defaults.items())


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


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return all settings and hyper-parameters that decide a run's results, except its seed."""
    plain = {key: value for key, value in run.config.items() if key not in _MAY_DIFFER and not isinstance(value, dict)}
    tables = [table for table in run.config.values() if isinstance(table, dict)]
    return plain | {key: value for table in tables for key, value in table.items()}


def _identity(run: StoredRun) -> str:
    from_summary: list[str] = []
    if run.config.get("data", "arrays") == "arrays":
        # The config does not name data that was given in Python; the summary does.
        from_summary = [run.text(key) for key in ("method", "dataset", "partition", "num_clients", "num_seen")]
    return json.dumps([from_summary, _settings(run)], sort_keys=True, default=str)


def _labels(runs: Sequence[StoredRun]) -> list[str]:
    """Return a label for each run: its method, and the settings that distinguish it from runs of the same method."""
    labels = [run.text("method") for run in runs]
    if len({run.text("dataset") for run in runs}) > 1:
        labels = [f"{label} {run.text('dataset')}" for label, run in zip(labels, runs, strict=True)]
    for label in _repeated(labels):
        places = [index for index, other in enumerate(labels) if other == label]
        for place, differences in zip(places, _differences([runs[place] for place in places]), strict=True):
            labels[place] = f"{label} {differences}".strip()
    repeated = _repeated(labels)
    return [name if label in repeated else label for label, name in zip(labels, names_of(runs), strict=True)]


def _repeated(labels: Sequence[str]) -> set[str]:
    return {label for label, times in Counter(labels).items() if times > 1}


def _differences(runs: Sequence[StoredRun]) -> list[str]:
    """Return the settings that tell each run from the others, for example `"client_lr 0.01, local_steps 5"`.

    At least two settings are named if two differ, and more if two do not tell all runs apart.
    """
    settings = [_settings(run) for run in runs]
    for one, run in zip(settings, runs, strict=True):
        # The summary has all hyper-parameters, the config only those that were given.
        defaults = (run.summary or {}).get("settings")
        for key in {key for other in settings for key in other} - one.keys():
            if isinstance(defaults, dict) and key in defaults:
                one[key] = defaults[key]
    keys = sorted({key for one in settings for key in one if len({str(other.get(key)) for other in settings}) > 1})

    def kinds(named: list[str]) -> int:
        return len({tuple(str(one.get(key)) for key in named) for one in settings})

    named: list[str] = []
    for key in keys:
        if kinds([*named, key]) > kinds(named):
            named.append(key)
    named = sorted({*named, *keys[: max(0, 2 - len(named))]})
    return [", ".join(_said(key, one[key]) for key in named if key in one) for one in settings]


def _said(key: str, value: Any) -> str:
    """Return a setting as text; a task stands for itself."""
    if key == "task":
        return str(value) or PLAIN
    return f"no {key}" if value == "" else f"{key} {value}"


def task_of(run: StoredRun) -> str:
    """Return the task of a run as text."""
    return str(run.value("task") or PLAIN)


def labels_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return what tells each run from the others: its method, the settings that differ, and its seed if seeds do."""
    members: dict[str, list[StoredRun]] = {}
    for run in runs:
        members.setdefault(_identity(run), []).append(run)
    labels = dict(zip(members, _labels([group[0] for group in members.values()]), strict=True))
    seeds = {identity: {run.text("seed") for run in group} for identity, group in members.items()}
    return [
        labels[_identity(run)] + (f", seed {run.text('seed')}" if len(seeds[_identity(run)]) > 1 else "")
        for run in runs
    ]


def names_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return a name for each run: its folder's name, or its path below the common folder if names are repeated."""
    names = [run.name for run in runs]
    if not _repeated(names):
        return names
    paths = [run.folder.path.resolve() for run in runs]
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(common).as_posix() for path in paths]


def differences_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return what tells each run from others of its method; for runs without such differences, their `names_of`."""
    labels, names = labels_of(runs), names_of(runs)
    if _repeated(labels):
        return names
    differences = [label.removeprefix(run.text("method")).strip(" ,") for run, label in zip(runs, labels, strict=True)]
    return [difference or name for difference, name in zip(differences, names, strict=True)]
