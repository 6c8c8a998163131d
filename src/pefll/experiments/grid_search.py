"""Grid search: finds the settings with the best validation metric, such as the accuracy, on seen clients.

It uses no test samples and no unseen clients. With `hold_out`, some seen clients do not train, and their
metric decides. The metric is the first one of the task; errors are better when smaller.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from torch import nn

from pefll.core.errors import Diverged, PefllError, unknown
from pefll.core.files import check_folder
from pefll.core.progress import say
from pefll.core.signals import Stopped
from pefll.core.wording import argument, counted, first_few
from pefll.data import Federation
from pefll.data.samples import VALIDATION
from pefll.experiments.conditions import Conditions
from pefll.experiments.trials import BOTH, HELD_OUT, HELD_OUT_SCORE, HOLDING_OUT, Settings, Trials, file_name, in_words
from pefll.methods import hyperparameters, typed_settings
from pefll.models import resolve_model
from pefll.runs import federations
from pefll.runs.config import Config
from pefll.runs.record import figure_text, metric_word, seed_folder
from pefll.tasks import Task
from pefll.tasks.checking import bound_task
from pefll.tasks.names import resolve_task
from pefll.tasks.sums import layout_of
from pefll.training import fitting, run
from pefll.training.evaluation import Measure
from pefll.training.resolve import Functions, RunSpec, clients_per_round, resolve

T = TypeVar("T")
JUDGES = ("held-out", BOTH)


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
        name = f"{name}{HOLDING_OUT}{search.hold_out}"
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
    pending = trials.missing(search.points, search.seeds)
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
                    seen, held = (_text(row.get(key), trials.metric) for key in ("seen_validation", HELD_OUT_SCORE))
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
    bound = bound_task(task, data)
    measure = Measure(bound, layout_of(bound, data.y, data.classes))
    metric = measure.names[0]
    model = config.model if search.model is not None else resolve_model(config.model, data.input_shape, data.tokens)
    return {
        "what": f"grid search by the validation {metric_word(metric)} of {by} at the best round",
        "metric": metric,
        **({"smaller_is_better": True} if metric in measure.errors else {}),
        **({"task": text} if text else {}),
        **({HELD_OUT: search.hold_out} if search.hold_out else {}),
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
