"""Groups of runs that differ only by seed, and names for runs and groups: what sets them apart."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.wording import first_few
from pefll.report.runs import DEFAULTS, OF_DATA, StoredRun, number, same_code, same_data
from pefll.runs.config import MAY_CHANGE

PLAIN = "classification"  # the task of a run whose settings name none

# Settings that may differ within a group. The seed decides the partition, so the data's fingerprint differs too. Runs
# with different numbers of rounds are different experiments, although a run may be extended.
_MAY_DIFFER = (MAY_CHANGE | {"seed", "data_sha256"}) - {"rounds"}


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only by seed."""

    label: str  # differs from the label of every other group
    runs: list[StoredRun]  # one per seed
    repeated: tuple[StoredRun, ...] = ()  # runs of seeds that are among `runs` already, which are left out


def group_runs(runs: Sequence[StoredRun], *, name_data: bool = True) -> list[SeedGroup]:
    """Group runs that differ only by seed, in the order of their first run; a repeated seed counts once.

    Args:
        runs: the runs.
        name_data: whether labels name data that differ. Otherwise, labels of groups on other data may be equal.
    """
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
    labels = _labels([group[0] for group in groups], name_data)
    return [
        SeedGroup(label, group, tuple(repeated.get(id(group), ()))) for label, group in zip(labels, groups, strict=True)
    ]


def repeated_note(groups: Sequence[SeedGroup]) -> str:
    """Return a sentence that names the runs that groups leave out as repeated seeds; "" for none."""
    left_out = [run for group in groups for run in group.repeated]
    if not left_out:
        return ""
    return f"Left out, as the same settings and seed as another run: {first_few(names_of(left_out))}."


def task_of(run: StoredRun) -> str:
    """Return the task of a run as text."""
    return str(run.value("task") or PLAIN)


def labels_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return a name for each run: its method, all settings that differ, and its seed if seeds do.

    Runs that still have the same name have their folder's name in it, too.
    """
    members: dict[str, list[StoredRun]] = {}
    for run in runs:
        members.setdefault(_identity(run), []).append(run)
    of_identity = dict(zip(members, _settings_labels([group[0] for group in members.values()], True), strict=True))
    seeds = {identity: {run.text("seed") for run in group} for identity, group in members.items()}
    labels = [
        of_identity[_identity(run)] + (f", seed {run.text('seed')}" if len(seeds[_identity(run)]) > 1 else "")
        for run in runs
    ]
    repeated = _repeated(labels)
    return [
        f"{label} ({name})" if label in repeated else label for label, name in zip(labels, names_of(runs), strict=True)
    ]


def names_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return a name for each run: its folder's name, or its path below the common folder if names are repeated."""
    names = [run.name for run in runs]
    if not _repeated(names):
        return names
    paths = [run.folder.path.resolve() for run in runs]
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(common).as_posix() for path in paths]


def note_of_unseen(runs: Sequence[StoredRun]) -> str:
    """Return a sentence about runs with unseen clients that have no curve; "" if there are none."""
    drawn = [run for run in runs if run.history]
    lacking = [np.isnan(run.validation("unseen", run.metric)).all() and _has_unseen(run) for run in drawn]
    if not any(lacking):
        return ""
    names = [name for name, lacks in zip(names_of(drawn), lacking, strict=True) if lacks]
    who = "" if all(lacking) else f" of {first_few(names)}"
    return f"Unseen clients{who} have no curve, because they were not evaluated during training."


def _has_unseen(run: StoredRun) -> bool:
    return bool(number(run.config.get("unseen") if run.summary is None else run.summary.get("num_unseen")))


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the settings that decide a run's results, except its seed and its hyper-parameters.

    A run of an earlier version lacks some settings, which then had the default.
    """
    found = DEFAULTS | run.config
    return {key: value for key, value in found.items() if key not in _MAY_DIFFER and not isinstance(value, dict)}


def _hyperparameters(run: StoredRun) -> dict[str, Any]:
    """Return the hyper-parameters of a run that were given."""
    tables = [table for table in run.config.values() if isinstance(table, dict)]
    return {key: value for table in tables for key, value in table.items()}


def _identity(run: StoredRun) -> str:
    from_summary: list[str] = []
    if run.config.get("data", "arrays") == "arrays":
        # The config does not name data that was given in Python; the summary does.
        from_summary = [run.text(key) for key in ("method", "dataset", "partition", "num_clients", "num_seen")]
    return json.dumps([from_summary, _settings(run), _hyperparameters(run)], sort_keys=True, default=str)


def _labels(runs: Sequence[StoredRun], name_data: bool) -> list[str]:
    """Return a label for each run: its method and all settings that differ. Runs with equal labels name their folder.

    Without `name_data`, labels of runs on other data may be equal.
    """
    labels, names = _settings_labels(runs, name_data), names_of(runs)
    pairs = list(zip(runs, labels, strict=True))
    unclear = [
        any(label == again and other is not run and (name_data or same_data(run, other)) for other, again in pairs)
        for run, label in pairs
    ]
    return [f"{label} ({name})" if again else label for label, name, again in zip(labels, names, unclear, strict=True)]


def _settings_labels(runs: Sequence[StoredRun], name_data: bool) -> list[str]:
    """Return the method of each run, and its settings that differ: every one, because none of them may be hidden.

    Hyper-parameters are compared among runs of the same method, settings of the data among those of the same data set.
    Every other setting, such as the task, the model and the schedules, is named for all runs if it differs.
    """
    methods, datasets = [run.text("method") for run in runs], _resolved(runs, "dataset", ("data",))
    models = _resolved(runs, "model", ("model", "data"))
    found: list[list[str]] = [[] for _ in runs]

    def add(parts: Sequence[Mapping[str, str]], kinds: Sequence[str]) -> None:
        for place, (mine, kind) in enumerate(zip(parts, kinds, strict=True)):
            others = [other for other, same in zip(parts, kinds, strict=True) if same == kind]
            found[place] += [text for key, text in mine.items() if any(other.get(key) != text for other in others)]

    everybody = [""] * len(runs)
    if name_data:
        add([{"dataset": dataset} for dataset in datasets], everybody)
    add([{"task": task_of(run)} for run in runs], everybody)
    add([_said({"model": model} | _of_training(run)) for run, model in zip(runs, models, strict=True)], everybody)
    if name_data:
        add([_said(_of_data(run)) for run in runs], datasets)
    add([_said(one) for one in _with_defaults(runs)], methods)
    return [" ".join(filter(None, (method, ", ".join(parts)))) for method, parts in zip(methods, found, strict=True)]


def _of_training(run: StoredRun) -> dict[str, Any]:
    """Return the settings that all methods have, but the task, the model and those of the data."""
    return {key: value for key, value in _settings(run).items() if key not in (*OF_DATA, "method", "task", "model")}


def _of_data(run: StoredRun) -> dict[str, Any]:
    """Return the settings that make clients of a data set."""
    return {key: value for key, value in _settings(run).items() if key in OF_DATA and key != "data"}


def _resolved(runs: Sequence[StoredRun], key: str, settings: Sequence[str]) -> list[str]:
    """Return what a setting such as "auto" means in each run: as its summary says, or that of a run alike."""
    asked = [tuple(str(run.config.get(name)) for name in settings) for run in runs]
    known = {one: run.text(key) for one, run in zip(asked, runs, strict=True) if run.finished}
    return [
        run.text(key) if run.finished else known.get(one, run.text(key)) for one, run in zip(asked, runs, strict=True)
    ]


def _with_defaults(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each run that another run of its method was given.

    The summary has all hyper-parameters, the config only those that were given.
    """
    given = [_hyperparameters(run) for run in runs]
    found = []
    for run, mine in zip(runs, given, strict=True):
        same = [one for other, one in zip(runs, given, strict=True) if other.text("method") == run.text("method")]
        keys = {key for one in same for key in one}
        defaults = (run.summary or {}).get("settings")
        usual = defaults.items() if isinstance(defaults, dict) else ()
        found.append({key: value for key, value in usual if key in keys} | mine)
    return found


def _said(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as texts by name, sorted."""
    return {key: _text(key, settings[key]) for key in sorted(settings)}


def _text(key: str, value: Any) -> str:
    if value == "":
        return f"no {key}"
    return f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"


def _repeated(labels: Sequence[str]) -> set[str]:
    return {label for label, times in Counter(labels).items() if times > 1}
