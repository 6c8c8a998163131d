"""Groups of runs that differ only by seed, and names for runs and groups: what sets them apart."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.core.wording import first_few
from pefll.report.runs import DEFAULTS, MISSING, OF_DATA, StoredRun, number, same_code, same_data
from pefll.runs.config import MAY_CHANGE
from pefll.runs.record import GROUPS, UNDEFINED, behind, figures_in, metric_word
from pefll.runs.titles import title_of

_IN_PYTHON = "<in-Python>"  # stands in the text of a task for code without a name
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
    named: bool = False  # whether a user chose the label

    @property
    def title(self) -> str:
        """The label with the title of the method, as papers write it; a user's label as it is."""
        if self.named:
            return self.label
        name, space, settings = self.label.partition(" ")
        # A label has settings after the name, or a folder in brackets.
        return title_of(name) + ("," if settings and not settings.startswith("(") else "") + space + settings


def group_runs(runs: Sequence[StoredRun], *, name_data: bool = True) -> list[SeedGroup]:
    """Group runs that differ only by seed, in the order of their first run; a repeated seed counts once.

    Args:
        runs: the runs.
        name_data: whether labels name data that differ. Otherwise, labels of groups on other data may be equal.
    """
    members: dict[str, list[list[StoredRun]]] = {}
    groups: list[list[StoredRun]] = []
    repeated: dict[int, list[StoredRun]] = {}
    for run, identity in zip(runs, _identities(runs), strict=True):
        alike = members.setdefault(identity, [])
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
    identities = _identities(runs)
    for run, identity in zip(runs, identities, strict=True):
        members.setdefault(identity, []).append(run)
    of_identity = dict(zip(members, _settings_labels([group[0] for group in members.values()], True), strict=True))
    seeds = {identity: {run.text("seed") for run in group} for identity, group in members.items()}
    labels = [
        of_identity[identity] + (f", seed {run.text('seed')}" if len(seeds[identity]) > 1 else "")
        for run, identity in zip(runs, identities, strict=True)
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
    lacking = [not any(row.get("unseen") for row in run.history) and _has_unseen(run) for run in drawn]
    if not any(lacking):
        return ""
    names = [name for name, lacks in zip(names_of(drawn), lacking, strict=True) if lacks]
    who = "" if all(lacking) else f" of {first_few(names)}"
    return f"Unseen clients{who} have no curve, because they were not evaluated during training."


def note_of_undefined(runs: Sequence[StoredRun], measures: Sequence[str]) -> str:
    """Return a sentence for each metric that has no value in tables of finished runs; "" if all have one."""
    lacking = [
        behind(measure, run.metric)
        for measure in dict.fromkeys(measures)
        for run in runs
        if any(_lacks(run, group, measure) for group in GROUPS)
    ]
    return " ".join(f"{MISSING}: {_no_value(name)}" for name in dict.fromkeys(lacking))


def _no_value(metric: str) -> str:
    return f"no value of {metric_word(metric)}, which {UNDEFINED.get(metric, 'is undefined on these samples')}."


def _lacks(run: StoredRun, group: str, measure: str) -> bool:
    """Return whether a metric is undefined on the test samples of a group of clients, at the best or the last round."""
    for moment in ("best", "final"):
        of_moment = figures_in(run.summary).get(moment)
        figures = of_moment.get(group) if isinstance(of_moment, dict) else None
        if isinstance(figures, dict) and measure in figures and number(figures[measure]) is None:
            return True
    return False


def note_of_undefined_curves(runs: Sequence[StoredRun]) -> str:
    """Return a sentence about runs whose metric was undefined at every evaluation; "" if there are none."""
    lacking = [run for run in runs if run.history and not has_curve(run)]
    if not lacking:
        return ""
    return f"No curve of {first_few(names_of(lacking))}: {_no_value(lacking[0].metric)}"


def has_curve(run: StoredRun) -> bool:
    """Return whether a run's metric has a value at one evaluation or more."""
    return not all(np.isnan(run.validation(group, run.metric)).all() for group in GROUPS)


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


def _identities(runs: Sequence[StoredRun]) -> list[str]:
    """Return a text for each run that others have, too, if they differ only by seed."""
    found = []
    for run in runs:
        from_summary: list[str] = []
        if run.config.get("data", "arrays") == "arrays":
            # The config does not name data that was given in Python; the summary does.
            from_summary = [run.text(key) for key in ("method", "dataset", "partition", "num_clients", "num_seen")]
        found.append(json.dumps([from_summary, _settings(run)], sort_keys=True, default=str))
    # A hyper-parameter that was given may be the default.
    unusual = [
        {key: value for key, value in _hyperparameters(run).items() if usual.get(key, _UNKNOWN) != value}
        for run, usual in zip(runs, _usual(runs, found), strict=True)
    ]
    return [text + json.dumps(one, sort_keys=True, default=str) for text, one in zip(found, unusual, strict=True)]


_UNKNOWN = object()


def _usual(runs: Sequence[StoredRun], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the default hyper-parameters of each run, as far as runs of its kind that were not given them show them.

    Some defaults depend on the data, so that `kinds` tell data apart.
    """
    found: dict[str, dict[str, Any]] = {}
    for run, kind in zip(runs, kinds, strict=True):
        given, every = _hyperparameters(run), _all_hyperparameters(run).items()
        usual = {key: value for key, value in every if key not in given and not _is_network(value)}
        found.setdefault(kind, {}).update(usual)
    return [found[kind] for kind in kinds]


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
    """Return the method of each run, and its settings that differ and are not the default.

    Hyper-parameters are compared among runs of the same method, settings of the data among those of the same data set.
    Every other setting, such as the task, the model and the schedules, is named for all runs if it differs. A run whose
    label does not name such a setting has its default, so that no difference is hidden.
    """
    methods, datasets = [run.text("method") for run in runs], _resolved(runs, "dataset", ("data",))
    models = _resolved(runs, "model", ("model", "data"))
    untrained = {
        one for one in methods if not any(run.config.get("rounds") for run in runs if run.text("method") == one)
    }
    found: list[list[str]] = [[] for _ in runs]

    def add(parts: Sequence[Mapping[str, _Setting]], kinds: Sequence[str]) -> None:
        for place, (mine, kind) in enumerate(zip(parts, kinds, strict=True)):
            others = [other for other, same in zip(parts, kinds, strict=True) if same == kind]
            found[place] += [
                one.text
                for key, one in mine.items()
                if one.text and any(other.get(key, _UNNAMED).value not in (one.value, None) for other in others)
            ]

    everybody = [""] * len(runs)
    if name_data:
        add([{"dataset": _Setting(dataset, dataset)} for dataset in datasets], everybody)
    add([_of_task(run) for run in runs], everybody)
    shared = []
    for run, model in zip(runs, models, strict=True):
        told = _said(_of_training(run), DEFAULTS)
        if run.text("method") in untrained:  # without rounds, these settings have no effect
            told |= {key: _Setting(None) for key in _OF_ROUNDS}
        usual = run.config.get("model", "auto") == "auto"
        shared.append({"model": _Setting(model, "" if usual else f"model {_named(model)}")} | told)
    add(shared, everybody)
    if name_data:
        add([_said(_of_data(run), DEFAULTS) for run in runs], datasets)
    add(_given_hyperparameters(runs, datasets), methods)
    return [
        " ".join(filter(None, (_named(method), ", ".join(parts)))) for method, parts in zip(methods, found, strict=True)
    ]


class _Setting(NamedTuple):
    """A setting of a run."""

    value: str | None  # two settings with the same value do not differ; None for one that has no effect
    text: str = ""  # what a label says of it; "" for a default


_UNNAMED = _Setting("")
# Settings that have no effect on a method without rounds.
_OF_ROUNDS = (
    *("rounds", "clients_per_round", "sampling", "prior_clients", "prior_rounds", "server_lr_schedule"),
    *("eval_every", "eval_clients"),
)


def _of_task(run: StoredRun) -> dict[str, _Setting]:
    """Return the kind of a run's task, and the task's settings, which have no default."""
    kind, *words = task_of(run).split() or [PLAIN]
    settings = {name: _named(value) for name, _, value in (word.partition("=") for word in words)}
    found = {name: _Setting(value, f"{name} {value}") for name, value in settings.items()}
    return {"task": _Setting(kind, "" if kind == PLAIN else _named(kind))} | found


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


def _given_hyperparameters(runs: Sequence[StoredRun], datasets: Sequence[str]) -> list[dict[str, _Setting]]:
    """Return the hyper-parameters of each run that another run of its method was given.

    The summary has all hyper-parameters, the config only those that were given, and no networks that were given in
    Python. A run that was not given one has its default.
    """
    given = [_hyperparameters(run) | _networks(run) for run in runs]
    kinds = [json.dumps([run.text("method"), dataset]) for run, dataset in zip(runs, datasets, strict=True)]
    found = []
    for run, mine, usual in zip(runs, given, _usual(runs, kinds), strict=True):
        same = [one for other, one in zip(runs, given, strict=True) if other.text("method") == run.text("method")]
        keys = {key for one in same for key in one}
        every = {key: value for key, value in _all_hyperparameters(run).items() if key in keys}
        found.append(_said(every | mine, usual | {key: value for key, value in every.items() if key not in mine}))
    return found


def _all_hyperparameters(run: StoredRun) -> dict[str, Any]:
    settings = (run.summary or {}).get("settings")
    return settings if isinstance(settings, dict) else {}


def _networks(run: StoredRun) -> dict[str, Any]:
    """Return the networks of a finished run that were given in Python."""
    return {key: value for key, value in _all_hyperparameters(run).items() if _is_network(value)}


def _is_network(value: Any) -> bool:
    return str(value).endswith(_GIVEN)


def _said(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, _Setting]:
    """Return settings as texts by name, sorted; `usual` has the defaults."""
    texts = {key: _text(settings[key]) for key in sorted(settings)}
    unusual = {key: key not in usual or _text(usual[key]) != text for key, text in texts.items()}
    return {
        key: _Setting(text, (f"{key} {text}" if text else f"no {key}") * unusual[key]) for key, text in texts.items()
    }


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _named(str(value))


_GIVEN = " (given in Python)"
_PLACE = re.compile(r"[\w.]+:(?:[\w.]|<locals>)*?([A-Za-z_]\w*|<lambda>)")
_MARKED = re.compile(r"^<(\w+)>$")


def _named(text: str) -> str:
    """Return a setting with a user's code as its name alone: `"my.losses:focal"` becomes `"focal"`."""
    words = re.split(r"([ ,])", text.removesuffix(_GIVEN))
    names = [found[1] if (found := _PLACE.fullmatch(word)) else word for word in words]
    return "".join("given in Python" if name == _IN_PYTHON else _MARKED.sub(r"\1", name) for name in names)


def _repeated(labels: Sequence[str]) -> set[str]:
    return {label for label, times in Counter(labels).items() if times > 1}
