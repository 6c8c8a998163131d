"""Grid search: finds the settings with the best validation metric, such as the accuracy, on seen clients.

It uses no test samples and no unseen clients. With `hold_out`, some seen clients do not train, and their
metric decides. The metric is the first one of the task; errors are better when smaller.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table
from torch import nn

from pefll.core.errors import Diverged, PefllError, unknown
from pefll.core.files import check_folder, make_folder, read_json, write_json
from pefll.core.progress import say
from pefll.core.signals import Stopped
from pefll.core.wording import argument, counted, first_few
from pefll.data import Federation
from pefll.data.samples import VALIDATION
from pefll.experiments.conditions import Conditions
from pefll.methods import hyperparameters, typed_settings
from pefll.models import resolve_model
from pefll.report import mean_and_std, mean_std_text
from pefll.runs import federations
from pefll.runs.config import Config
from pefll.runs.record import figure_text, figures_in, is_share, metric_word, seed_folder
from pefll.tasks import Task
from pefll.tasks.names import resolve_task
from pefll.tasks.sums import layout_of
from pefll.training import fitting, run
from pefll.training.evaluation import Measure
from pefll.training.resolve import Functions, RunSpec, clients_per_round, resolve

T = TypeVar("T")
Settings = dict[str, Any]
TUNED = Path("results/tune")
_HELD_OUT, _HELD_OUT_SCORE = "hold_out", "held_out_validation"
_BOTH, _BOTH_SCORE = "both", "held_out_and_seen_validation"  # the mean of both accuracies
JUDGES = ("held-out", _BOTH)
# What a file of an earlier version, or of plain classification, does not say.
_UNSAID = {"judge": None, "metric": "per_sample", "smaller_is_better": False, "task": ""}
_HOLDING_OUT = "-holding-out-"  # in the names of trial files: DATA-METHOD-nCLIENTS-holding-out-SHARE.json
# Summary fields copied into a trial.
_KEPT = (
    *("best_round", "train_seconds", "eval_seconds", "wall_seconds", "test_seconds", "lockstep", "timing", "device"),
    *("precision", "local_steps", "commit", "version", "torch", "data_sha256", "finished"),
)


@dataclass(frozen=True)
class Search:
    """A grid search: which settings to try.

    Attributes:
        config: config of all runs; its `settings` are fixed hyper-parameters.
        grid: hyper-parameter -> values to try.
        seeds: seeds with which each setting is tried.
        hold_out: share of the seen clients that do not train, and whose metric decides. 0 for none.
        judge: whose metric decides if there are held-out clients: held-out, or both for the mean of their metric and
            that of the clients that train.
        federation: the federation of a seed, if it was given in Python; None for the config's.
        task: a task given in Python; None for the config's.
        model: a client model given in Python; None for the config's.
        networks: a user's own networks given in Python, by the names of hyper-parameters.
        functions: a user's schedules and sampling given in Python, by the names of settings.
    """

    config: Config
    grid: dict[str, tuple[Any, ...]]
    seeds: tuple[int, ...] = (0,)
    hold_out: float = 0.0
    judge: str = "held-out"
    federation: Callable[[int], Federation] | None = None
    task: Task | None = None
    model: nn.Module | None = None
    networks: Mapping[str, Any] = field(default_factory=dict)
    functions: Functions = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = self.grid.keys() & self.config.settings.keys()
        if both:
            one, other = argument("settings", option="--set"), argument("grid")
            raise PefllError(f"{min(both)} is both fixed and searched; give either {one} or {other}", code="PEFLL-X011")
        if not 0 <= self.hold_out < 1:
            raise PefllError(
                f"{argument('hold_out')} is {self.hold_out}; it must be at least 0 and less than 1", code="PEFLL-X012"
            )
        if self.judge not in JUDGES:
            raise unknown("judge", self.judge, JUDGES)

    @property
    def points(self) -> list[Settings]:
        """All settings of the grid, including the fixed ones."""
        values = itertools.product(*self.grid.values())
        return [self.config.settings | dict(zip(self.grid, point, strict=True)) for point in values]

    def includes(self, point: Settings) -> bool:
        """Return whether a point differs from this search's points only in the values of what is searched."""
        fixed = hyperparameters(self.config.method)
        mine, other = fixed | self.config.settings, fixed | point
        # As a file of trials has them: a tuple becomes a list.
        return all(json.dumps(mine[name]) == json.dumps(other.get(name)) for name in mine.keys() - self.grid.keys())


def parse_grid(method: str, words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return a grid from words such as `client_lr=1e-3,1e-2`; PefllError for other words."""
    grid: dict[str, tuple[Any, ...]] = {}
    for word in words:
        name, _, values = (part.strip() for part in word.partition("="))
        listed = [value.strip() for value in values.split(",")]
        if not name or not all(listed):
            raise PefllError(
                f"{argument('grid')} takes NAME=VALUE,VALUE, such as client_lr=1e-3,1e-2, not {word!r}",
                code="PEFLL-X013",
            )
        typed = tuple(typed_settings(method, {name: value})[name] for value in listed)
        if name in grid or len(set(typed)) < len(typed):
            raise PefllError(
                f"{argument('grid')} has {name} or one of its values twice; list each once", code="PEFLL-X014"
            )
        grid[name] = typed
    if not grid:
        raise PefllError(
            f"there is nothing to try; give a grid, for example {argument('grid', 'client_lr=1e-3,3e-3,1e-2')}",
            code="PEFLL-X015",
        )
    return grid


@dataclass
class Trials:
    """All trials of one method on one federation, stored in one JSON file.

    Attributes:
        path: path of the file.
        protocol: the conditions that all trials share.
        rows: one row per setting and seed, the oldest first.
        best: the best settings of the last complete search, with their score.
        counts: whether a row belongs to the search at hand; other rows stay in the file and are not ranked.
    """

    path: Path
    protocol: dict[str, Any]
    rows: list[dict[str, Any]]
    best: dict[str, Any] | None = None
    counts: Callable[[dict[str, Any]], bool] = lambda row: True

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The rows that belong to the search at hand."""
        return [row for row in self.rows if self.counts(row)]

    @classmethod
    def read(cls, path: Path, protocol: dict[str, Any]) -> Trials:
        """Read earlier trials from a file, if it exists; PefllError if they have another protocol."""
        if not path.is_file():
            return cls(path, protocol, [])
        earlier = read_json(path)
        for name, value in (_UNSAID | protocol).items():
            if earlier.get(name, _UNSAID.get(name)) != value:
                raise PefllError(
                    f"{path} was made with {name} = {earlier.get(name)!r}, not {value!r}, so its figures are not "
                    f"comparable; choose another {argument('target', option='--to')}, or delete the file",
                    code="PEFLL-X016",
                )
        return cls(path, protocol, list(earlier["trials"]), earlier["best"])

    def missing(self, search: Search) -> list[tuple[Settings, int]]:
        """Return the settings and seeds of a search that have no trial yet."""
        tried = {(self._whole(row["settings"]), row["seed"]) for row in self.counted}
        wanted = itertools.product(search.points, search.seeds)
        return [(point, seed) for point, seed in wanted if (self._whole(point), seed) not in tried]

    def add(self, point: Settings, seed: int, outcome: run.Run | Diverged, conditions: Conditions) -> dict[str, Any]:
        """Append the outcome of a trial as a row, and return the row."""
        row: dict[str, Any] = {"settings": point, "seed": seed, "seen_validation": None, "error": None}
        row |= vars(conditions)
        if isinstance(outcome, Diverged):
            row["error"] = str(outcome)
        else:
            groups = figures_in(outcome.summary)["best"]
            row["seen_validation"] = (groups["seen"] or {}).get(self.metric)
            if _HELD_OUT in self.protocol:
                row[_HELD_OUT_SCORE] = (groups["unseen"] or {}).get(self.metric)
            if "as_new" in outcome.summary:
                row["as_new"] = outcome.summary["as_new"]
            row |= {key: outcome.summary[key] for key in _KEPT}
        self.rows.append(row)
        return row

    def choose(self, seeds: Sequence[int]) -> None:
        """Set `best` to the best of all settings that were tried with each of these seeds."""
        point, values = next(iter(self.ranking(seeds)), ({}, []))
        if not values:
            self.best = None
            return
        self.best = {"settings": point, self._score: mean_and_std(values)[0], "seeds": list(seeds)}
        if as_new := self.as_new(point, seeds):
            self.best["as_new"] = mean_and_std(as_new)[0]

    def write(self) -> None:
        """Write the file."""
        make_folder(self.path.parent)
        write_json(self.path, self.protocol | {"best": self.best, "trials": self.rows})

    def ranking(self, seeds: Sequence[int]) -> list[tuple[Settings, list[float]]]:
        """Return the settings that were tried with each of these seeds, and their figures; the best mean first.

        Settings that differ only in `new_*` share one training score. Ties are ranked by the metric of seen clients
        that are treated as new, then by the age of the trial. Settings that diverged with a seed come last, with an
        empty list. With `hold_out`, the metric of the held-out clients counts; with `judge="both"`, its mean with the
        metric of the clients that train.
        """
        return [(point, scores) for point, scores, _ in self._ranked(seeds)]

    def tied(self, seeds: Sequence[int]) -> list[Settings]:
        """Return the best settings and all settings with the same score, in the order of the ranking."""
        ranked = self._ranked(seeds)
        # Means are compared approximately, because rounding errors depend on the order of their terms.
        same = [rank for *_, rank in ranked if all(map(math.isclose, rank, ranked[0][2]))]
        return [point for point, *_ in ranked[: len(same)]]

    def _ranked(self, seeds: Sequence[int]) -> list[tuple[Settings, list[float], tuple[float, float]]]:
        """Return (settings, figures, rank) per setting, the best first; see `ranking`."""
        found: dict[str, tuple[Settings, dict[int, dict[str, Any]]]] = {}
        for row in self.counted:
            _, tried = found.setdefault(self._whole(row["settings"]), (row["settings"], {}))
            tried[row["seed"]] = row
        complete: list[tuple[Settings, list[float], float]] = []
        of_training: dict[str, list[float]] = {}
        for point, tried in found.values():
            if not all(seed in tried for seed in seeds):
                continue
            known = [self._value(tried[seed]) for seed in seeds]
            scores = [score for score in known if score is not None]
            scores = scores if len(scores) == len(seeds) else []
            as_new = [tried[seed].get("as_new", -self._sign * math.inf) for seed in seeds]
            complete.append((point, scores, mean_and_std(as_new)[0]))
            of_training.setdefault(self._trained(point), []).extend(scores)

        def rank(point: Settings, scores: list[float], as_new: float) -> tuple[float, float]:
            if not scores:
                return math.inf, 0.0
            if _HELD_OUT in self.protocol:
                return -self._sign * mean_and_std(scores)[0], 0.0
            return -self._sign * mean_and_std(of_training[self._trained(point)])[0], -self._sign * as_new

        ranked = [(point, scores, rank(point, scores, as_new)) for point, scores, as_new in complete]
        return sorted(ranked, key=lambda one: one[2])

    @property
    def metric(self) -> str:
        """The metric that ranks settings: the first one of the task."""
        return str(self.protocol.get("metric", _UNSAID["metric"]))

    @property
    def in_per_cent(self) -> bool:
        """Whether this metric is shown in per cent."""
        return is_share(self.metric, self.metric)

    @property
    def _sign(self) -> float:
        """1 if the metric is better when larger, -1 for an error."""
        return -1.0 if self.protocol.get("smaller_is_better") else 1.0

    @property
    def _score(self) -> str:
        """Name of the score that ranks settings."""
        if self.protocol.get("judge") == _BOTH:
            return _BOTH_SCORE
        return _HELD_OUT_SCORE if _HELD_OUT in self.protocol else "seen_validation"

    def _value(self, row: dict[str, Any]) -> float | None:
        """Return a trial's score, or None if it diverged or if the metric is not defined."""
        if self._score != _BOTH_SCORE:
            return row.get(self._score)
        both = row["seen_validation"], row.get(_HELD_OUT_SCORE)
        return None if None in both else sum(both) / 2

    def _trained(self, point: Settings) -> str:
        """Return a key for the hyper-parameters that affect training: all but `new_*`."""
        return self._whole({name: value for name, value in point.items() if not name.startswith("new_")})

    def as_new(self, point: Settings, seeds: Sequence[int]) -> list[float]:
        """Return the metric of seen clients treated as new, per seed; empty if not measured."""
        wanted = self._whole(point)
        rows = [row for row in self.counted if self._whole(row["settings"]) == wanted and row["seed"] in seeds]
        return [row["as_new"] for row in rows if "as_new" in row]

    def diverged(self, point: Settings) -> bool:
        """Return whether a trial of some settings diverged."""
        wanted = self._whole(point)
        return any(row.get("error") for row in self.counted if self._whole(row["settings"]) == wanted)

    def _whole(self, point: Settings) -> str:
        """Return a key for all hyper-parameters; those that `point` does not name have their defaults."""
        return json.dumps(hyperparameters(self.protocol["method"]) | point, sort_keys=True)


def run_search(search: Search, out: Path, target: Path, at_once: int, console: Console) -> Trials:
    """Run the missing trials of a search, and return all trials; their file is written after every batch.

    Args:
        search: the settings to try.
        out: folder for runs. Stopped runs in it are resumed. The checkpoints of finished runs are deleted.
        target: folder of the trial file.
        at_once: number of runs that share the device.
        console: console for progress.

    Raises:
        Stopped: after Ctrl-C, SIGTERM or the end of the terminal. Each run has then written a checkpoint.
    """
    check_at_once(at_once)
    check_folder(target)
    partitioned: dict[int, Federation] = {}

    def data(seed: int) -> Federation:
        if search.federation is not None:
            return search.federation(seed)
        if seed not in partitioned:
            partitioned[seed] = federations.federation_of(dataclasses.replace(search.config, seed=seed), console)
        return partitioned[seed]

    first = data(search.seeds[0])
    if not first.count[VALIDATION, : first.num_seen].sum():
        raise PefllError(
            f"{first.name} has no validation samples, so a search cannot choose; give each client more samples",
            code="PEFLL-X500",
        )
    name = file_name(search.config.data, search.config.method, first.num_clients)
    if search.hold_out:
        name = f"{name}{_HOLDING_OUT}{search.hold_out}"
    trials = Trials.read(target / f"{name}.json", _protocol(search, first))
    runs, known = out / name, dict[str, Conditions]()

    def conditions(point: Settings, seed: int) -> Conditions:
        key = json.dumps([point, seed], sort_keys=True)
        if key not in known:
            known[key] = Conditions.of(_spec(search, point, data(seed), seed, None, 1))
        return known[key]

    def counts(row: dict[str, Any]) -> bool:
        point, seed = row["settings"], row["seed"]
        if seed not in search.seeds or not search.includes(point):
            return False
        return conditions(point, seed).are_those_of(row)

    trials.counts = counts
    pending = trials.missing(search)
    parts = chunks(pending, at_once)
    say(
        console,
        f"{name}: {counted(len(search.points), 'setting')} with {counted(len(search.seeds), 'seed')}; "
        f"{counted(len(pending), 'run')} to do",
    )
    for batch in parts:
        specs = [
            _spec(search, point, data(seed), seed, runs, len(batch), conditions(point, seed)) for point, seed in batch
        ]
        outcomes = fitting.train_all(specs, console=console)
        for (point, seed), spec, outcome in zip(batch, specs, outcomes, strict=True):
            if isinstance(outcome, run.Run | Diverged):
                row = trials.add(point, seed, outcome, conditions(point, seed))
                if row["error"] is None:
                    seen, held = (_text(row.get(key), trials.metric) for key in ("seen_validation", _HELD_OUT_SCORE))
                    held = f", held out {held}" if search.hold_out else ""
                    say(console, f"{spec.label}: validation {metric_word(trials.metric)} seen {seen}{held}")
                elif len(batch) == 1:  # `train_all` reports failures only if it trains several runs
                    say(console, f"{spec.label} failed: {row['error']}")
        trials.write()
        delete_checkpoints(specs, outcomes)
        raise_first(outcomes)
    trials.choose(search.seeds)  # after the last batch, because earlier some settings are not tried yet
    trials.write()
    return trials


def _text(value: float | None, metric: str) -> str:
    return figure_text({metric: value}, metric)


def _spec(
    search: Search,
    point: Settings,
    data: Federation,
    seed: int,
    out: Path | None,
    runs: int,
    conditions: Conditions | None = None,
) -> RunSpec:
    """Return the spec of a trial; its folder in `out` is named after its settings, seed and conditions."""
    config = search.config
    if search.hold_out:
        c = clients_per_round(config, data)  # the same number as without held-out clients
        data = data.holding_out(search.hold_out)
        config = dataclasses.replace(config, clients_per_round=min(c, data.num_seen))
    config = dataclasses.replace(config, settings=point, seed=seed, partition=data.partition, clients=data.num_clients)
    label = f"{in_words(point)} seed {seed}"
    folder = None
    if out is not None and conditions is not None:
        words = "-".join(f"{name}_{value}" for name, value in point.items()).replace("/", "_")
        folder = out / words / f"{seed_folder(out, seed).name}-{conditions.sha256[:8]}"
    given: dict[str, Any] = {"model": search.model, "task": search.task, "networks": search.networks}
    given |= {"functions": search.functions, "tunes": True, "holds_out": search.hold_out > 0}
    return resolve(config, data, folder, runs=runs, label=label, **given)


def _protocol(search: Search, data: Federation) -> dict[str, Any]:
    """Return the conditions that trials must share to be comparable."""
    config = search.config
    by = "seen clients that take no part in training," if search.hold_out else "seen clients"
    task, data, text = resolve_task(search.task or config.task, data)
    bound = task.bind(data)
    measure = Measure(bound, layout_of(bound, data.y, data.classes))
    metric = measure.names[0]
    model = config.model if search.model is not None else resolve_model(config.model, data.input_shape, data.tokens)
    return {
        "what": f"grid search by the validation {metric_word(metric)} of {by} at the best round",
        "metric": metric,
        **({"smaller_is_better": True} if metric in measure.errors else {}),
        **({"task": text} if text else {}),
        **({_HELD_OUT: search.hold_out} if search.hold_out else {}),
        **({"judge": search.judge} if search.hold_out and search.judge != JUDGES[0] else {}),
        "method": config.method,
        "dataset": data.name,
        "partition": data.partition,
        "num_clients": data.num_clients,
        "num_seen": data.num_seen,
        "model": model,
        "rounds": config.rounds,
        "clients_per_round": clients_per_round(config, data),
    }


def delete_checkpoints(specs: Sequence[RunSpec], outcomes: Sequence[object]) -> None:
    """Delete the checkpoints of ended runs, whose scores are saved elsewhere."""
    for spec, outcome in zip(specs, outcomes, strict=True):
        if spec.folder is not None and isinstance(outcome, run.Run | Diverged):
            shutil.rmtree(spec.folder.checkpoints, ignore_errors=True)


def raise_first(outcomes: Sequence[object]) -> None:
    """Raise the first error that is not divergence, for example a stop signal or a full disk."""
    for outcome in outcomes:
        if isinstance(outcome, Stopped | PefllError) and not isinstance(outcome, Diverged):
            raise outcome


def check_at_once(number: int) -> None:
    """Raise PefllError if `number` is less than 1."""
    if number < 1:
        raise PefllError(f"{argument('at_once')} is {number}; it must be at least 1", code="PEFLL-X017")


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the items in groups of `size`; the last group may be smaller."""
    check_at_once(size)
    return [items[start : start + size] for start in range(0, len(items), size)]


def in_words(point: Settings) -> str:
    """Return settings as text: `client_lr=0.01 server_lr=0.001`."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def trials_table(trials: Trials, seeds: Sequence[int]) -> Table:
    """Return a table of all settings that were tried with these seeds, the best first and in bold."""
    ranking = trials.ranking(seeds)
    names = list(dict.fromkeys(name for point, _ in ranking for name in point))
    whose = "held out" if _HELD_OUT in trials.protocol else "seen"
    if trials.protocol.get("judge") == _BOTH:
        whose = "held out and seen"
    factor, unit = (100, ", %") if trials.in_per_cent else (1, "")
    title = f"Validation {metric_word(trials.metric)} of {whose} clients, {counted(len(seeds), 'seed')}"
    as_new = [trials.as_new(point, seeds) for point, _ in ranking]
    table = Table(*names, f"{whose} validation{unit}", title=title, title_justify="left")
    if any(as_new):
        table.add_column(f"treated as new{unit}")
    for place, (point, values) in enumerate(ranking):
        cells = [str(point.get(name, "")) for name in names]
        shown = mean_std_text([factor * value for value in values], trials.in_per_cent)
        cells.append(shown if values else "diverged" if trials.diverged(point) else "not defined")
        if any(as_new):
            cells.append(mean_std_text([factor * value for value in as_new[place]], trials.in_per_cent))
        table.add_row(*cells, style="bold" if place == 0 and values else "")
    return table


def advice(trials: Trials, search: Search) -> list[str]:
    """Return a sentence for each hyper-parameter whose best value is the smallest or the largest value tried.

    If several settings are equally good, one sentence says so. There is no advice about values in which they differ.
    """
    ranking = trials.ranking(search.seeds)
    if not ranking or not ranking[0][1]:
        return []
    sentences = []
    equals = [hyperparameters(search.config.method) | point for point in trials.tied(search.seeds)]
    differ = [name for name in equals[0] if any(other[name] != equals[0][name] for other in equals)]
    if differ:
        words = [in_words({name: one[name] for name in differ}) for one in equals]
        sentences.append(f"{first_few(words)} tie; {words[0]} is used")
    for name, best in ranking[0][0].items():
        if name in differ:
            continue
        tried = {point[name] for point, _ in ranking if name in point}
        if len(tried) > 1 and isinstance(best, int | float):
            for edge, word, beyond in ((min(tried), "smallest", "smaller"), (max(tried), "largest", "larger")):
                if best == edge:
                    sentences.append(f"{name} = {best} is the {word} value tried; try {beyond} ones")
    return sentences


def file_name(data: str, method: str, clients: int | str) -> str:
    """Return the trial file's name without extension; with `clients=""`, the start of the name before the number."""
    return f"{Path(data).stem}-{method}-n{clients}"


class TunedSettings(NamedTuple):
    """Hyper-parameters for a method in a cell, and a text that says where they come from."""

    settings: Settings
    source: str


def tuned_settings(method: str, data: str, clients: int, folder: Path = TUNED) -> TunedSettings:
    """Return the best settings found for a method on a federation.

    Settings tuned with --hold-out for the same number of clients take precedence. Otherwise, use the settings tuned on
    the same data for the nearest number of clients: those without --hold-out if there are any, else those with it.
    Without any, the settings are empty.

    Args:
        method: name of the method.
        data: name of the data set.
        clients: number of clients.
        folder: folder of trial files.
    """
    tuned: dict[int, Settings] = {}
    for_new: dict[int, Settings] = {}
    any_file = re.compile(re.escape(file_name(data, method, "")) + rf"(\d+)({_HOLDING_OUT}.+)?")
    for path in sorted(folder.glob("*.json")):
        named = any_file.fullmatch(path.stem)
        if named is None or not (best := read_json(path)["best"]):
            continue
        (tuned if named[2] is None else for_new)[int(named[1])] = best["settings"]
    found = for_new if clients in for_new else tuned or for_new
    if not found:
        return TunedSettings({}, "defaults")
    number = min(found, key=lambda number: (abs(math.log(number / clients)), number))
    return TunedSettings(found[number], f"tuned at n={number}{' for new clients' if found is for_new else ''}")
