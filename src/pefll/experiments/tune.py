"""Grid search by the validation accuracy of seen clients: test samples and unseen clients take no part in a choice.

What matters to new clients can be chosen by seen clients that are held out of training, as if they were unseen.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from pefll.core.errors import Diverged, PefllError
from pefll.core.files import check_folder, make_folder, read_json, write_json
from pefll.core.progress import say
from pefll.core.signals import Stopped
from pefll.core.wording import argument, counted, first_few
from pefll.data import Federation
from pefll.methods import hyperparameters, typed_settings
from pefll.models import resolve_model
from pefll.report import mean_and_std, mean_std_text
from pefll.runs import federations
from pefll.runs.config import Config
from pefll.runs.record import seed_folder
from pefll.training import fitting, run
from pefll.training.resolve import RunSpec, clients_per_round, resolve

T = TypeVar("T")
Settings = dict[str, Any]
TUNED = Path("results/tune")
_HELD_OUT, _HELD_OUT_SCORE = "hold_out", "held_out_validation"
_HOLDING_OUT = "-holding-out-"  # between a file's usual name and the share, for trials of their own
# What of a finished run's summary its trial keeps.
_KEPT = (
    *("best_round", "train_seconds", "eval_seconds", "wall_seconds", "test_seconds", "lockstep", "timing", "device"),
    *("precision", "local_steps", "commit", "version", "torch", "data_sha256", "finished"),
)


@dataclass(frozen=True)
class Search:
    """What to try.

    Attributes:
        config: everything that is the same for all; its `settings` are fixed.
        grid: values for each hyper-parameter that is searched.
        seeds: each setting is tried with all of them.
        hold_out: share of the seen clients that take no part in training, by which settings are chosen; 0 for none.
    """

    config: Config
    grid: dict[str, tuple[Any, ...]]
    seeds: tuple[int, ...] = (0,)
    hold_out: float = 0.0

    def __post_init__(self) -> None:
        both = self.grid.keys() & self.config.settings.keys()
        if both:
            one, other = argument("settings", option="--set"), argument("grid")
            raise PefllError(f"{min(both)} is both fixed and searched; say either {one} or {other}", code="PEFLL-X011")
        if not 0 <= self.hold_out < 1:
            raise PefllError(
                f"{argument('hold_out')} is {self.hold_out}; it is a share, from 0 to less than 1", code="PEFLL-X012"
            )

    @property
    def points(self) -> list[Settings]:
        """All settings of the grid, each with those that are fixed."""
        values = itertools.product(*self.grid.values())
        return [self.config.settings | dict(zip(self.grid, point, strict=True)) for point in values]


def parse_grid(method: str, words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return a grid from words such as `client_lr=1e-3,1e-2`; PefllError for what is not one."""
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
            raise PefllError(f"{argument('grid')} has {name} or one of its values twice", code="PEFLL-X014")
        grid[name] = typed
    if not grid:
        raise PefllError(
            f"say what to try, for example {argument('grid', 'client_lr=1e-3,3e-3,1e-2')}", code="PEFLL-X015"
        )
    return grid


@dataclass
class Trials:
    """Everything that was tried for one method on one federation: a JSON file that is read again to go on.

    Attributes:
        path: the file.
        protocol: what all trials have in common.
        rows: one per setting and seed, in the order in which they were tried.
        best: the settings that the last search that came to its end has chosen, and how good they were.
    """

    path: Path
    protocol: dict[str, Any]
    rows: list[dict[str, Any]]
    best: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path, protocol: dict[str, Any]) -> Trials:
        """Read what was tried before; PefllError where that was under other conditions."""
        if not path.is_file():
            return cls(path, protocol, [])
        earlier = read_json(path)
        for name, value in protocol.items():
            if earlier.get(name) != value:
                raise PefllError(
                    f"{path} was made with {name} = {earlier.get(name)!r}, not {value!r}; accuracies would not be "
                    f"comparable: choose another {argument('target', option='--to')}, or remove it",
                    code="PEFLL-X016",
                )
        return cls(path, protocol, list(earlier["trials"]), earlier["best"])

    def missing(self, search: Search) -> list[tuple[Settings, int]]:
        """Return the settings and seeds of a search that were not tried."""
        tried = {(self._whole(row["settings"]), row["seed"]) for row in self.rows}
        wanted = itertools.product(search.points, search.seeds)
        return [(point, seed) for point, seed in wanted if (self._whole(point), seed) not in tried]

    def add(self, point: Settings, seed: int, outcome: run.Run | Diverged) -> dict[str, Any]:
        """Note what became of a setting, and return the note."""
        row: dict[str, Any] = {"settings": point, "seed": seed, "seen_validation": None, "error": None}
        if isinstance(outcome, Diverged):
            row["error"] = str(outcome)
        else:
            accuracy = outcome.summary["accuracy"]["best"]
            row["seen_validation"] = accuracy["seen"]["per_sample"]
            if _HELD_OUT in self.protocol:
                row[_HELD_OUT_SCORE] = accuracy["unseen"]["per_sample"]
            if "as_new" in outcome.summary:
                row["as_new"] = outcome.summary["as_new"]
            row |= {key: outcome.summary[key] for key in _KEPT}
        self.rows.append(row)
        return row

    def choose(self, seeds: Sequence[int]) -> None:
        """Choose the best of the settings that were tried with all these seeds."""
        point, values = next(iter(self.ranking(seeds)), ({}, []))
        if not values:
            self.best = None
            return
        self.best = {"settings": point, self._score: mean_and_std(values)[0], "seeds": list(seeds)}
        if strangers := self.as_new(point, seeds):
            self.best["as_new"] = mean_and_std(strangers)[0]

    def write(self) -> None:
        """Write the file."""
        make_folder(self.path.parent)
        write_json(self.path, self.protocol | {"best": self.best, "trials": self.rows})

    def ranking(self, seeds: Sequence[int]) -> list[tuple[Settings, list[float]]]:
        """Return settings that were tried with all these seeds and their accuracies, the best mean first.

        Settings that differ only in what new clients do (`new_lr`, `new_rounds`) trained the same: they share one mean,
        and among them those come first with which seen clients fare best as new ones. Of equals the one that was tried
        first comes first. Settings that diverged with a seed come last, with an empty list. Where clients are held out,
        accuracies are theirs, and only these count.
        """
        return [(point, scores) for point, scores, _ in self._ranked(seeds)]

    def tied(self, seeds: Sequence[int]) -> list[Settings]:
        """Return the settings that no other ones beat, in the order of the ranking: the best, and its equals."""
        ranked = self._ranked(seeds)
        # Means of the same accuracies in another order may differ by rounding.
        same = [rank for *_, rank in ranked if all(map(math.isclose, rank, ranked[0][2]))]
        return [point for point, *_ in ranked[: len(same)]]

    def _ranked(self, seeds: Sequence[int]) -> list[tuple[Settings, list[float], tuple[float, float]]]:
        """Return settings, their accuracies and what they are ranked by, the best first; see `ranking`."""
        found: dict[str, tuple[Settings, dict[int, dict[str, Any]]]] = {}
        for row in self.rows:
            _, tried = found.setdefault(self._whole(row["settings"]), (row["settings"], {}))
            tried[row["seed"]] = row
        complete: list[tuple[Settings, list[float], float]] = []
        of_training: dict[str, list[float]] = {}
        for point, tried in found.values():
            if not all(seed in tried for seed in seeds):
                continue
            known = [tried[seed].get(self._score) for seed in seeds]
            scores = [score for score in known if score is not None]
            scores = scores if len(scores) == len(seeds) else []
            as_new = [tried[seed].get("as_new", 0.0) for seed in seeds]
            complete.append((point, scores, mean_and_std(as_new)[0]))
            of_training.setdefault(self._trained(point), []).extend(scores)

        def rank(point: Settings, scores: list[float], as_new: float) -> tuple[float, float]:
            if scores and _HELD_OUT in self.protocol:
                return -mean_and_std(scores)[0], 0.0
            return (-mean_and_std(of_training[self._trained(point)])[0], -as_new) if scores else (1.0, 0.0)

        ranked = [(point, scores, rank(point, scores, as_new)) for point, scores, as_new in complete]
        return sorted(ranked, key=lambda one: one[2])

    @property
    def _score(self) -> str:
        """What of a trial settings are chosen by."""
        return _HELD_OUT_SCORE if _HELD_OUT in self.protocol else "seen_validation"

    def _trained(self, point: Settings) -> str:
        """Return the hyper-parameters that matter to clients that take part, as a key."""
        return self._whole({name: value for name, value in point.items() if not name.startswith("new_")})

    def as_new(self, point: Settings, seeds: Sequence[int]) -> list[float]:
        """Return how seen clients fared as new ones with these settings, for each seed; empty where nobody looked."""
        wanted = self._whole(point)
        rows = [row for row in self.rows if self._whole(row["settings"]) == wanted and row["seed"] in seeds]
        return [row["as_new"] for row in rows if "as_new" in row]

    def _whole(self, point: Settings) -> str:
        """Return all hyper-parameters, also those that are not in the grid, as a key."""
        return json.dumps(hyperparameters(self.protocol["method"]) | point, sort_keys=True)


def tune(search: Search, out: Path, target: Path, at_once: int, console: Console) -> Trials:
    """Try every setting of a grid that was not tried before, and write what came out after every batch.

    Args:
        search: what to try.
        out: a folder for runs; one that was stopped is resumed from there. Finished ones keep no weights.
        target: a folder for the file of trials.
        at_once: how many runs share the device.
        console: shows progress.

    Raises:
        Stopped: after Ctrl-C, SIGTERM or the end of the terminal, with a checkpoint of each run written.
    """
    check_at_once(at_once)
    check_folder(target)
    dealt: dict[int, Federation] = {}

    def data(seed: int) -> Federation:
        if seed not in dealt:
            dealt[seed] = federations.federation_of(dataclasses.replace(search.config, seed=seed), console)
        return dealt[seed]

    first = data(search.seeds[0])
    name = file_name(search.config.data, search.config.method, first.num_clients)
    if search.hold_out:
        name = f"{name}{_HOLDING_OUT}{search.hold_out}"
    trials = Trials.read(target / f"{name}.json", _protocol(search, first))
    runs = out / name
    pending = trials.missing(search)
    parts = chunks(pending, at_once)
    say(
        console,
        f"{name}: {counted(len(search.points), 'setting')} with {counted(len(search.seeds), 'seed')}; "
        f"{counted(len(pending), 'run')} {'is' if len(pending) == 1 else 'are'} to be done",
    )
    for batch in parts:
        specs = [_spec(search, point, data(seed), seed, runs, len(batch)) for point, seed in batch]
        outcomes = fitting.train_all(specs, console=console)
        for (point, seed), spec, outcome in zip(batch, specs, outcomes, strict=True):
            if isinstance(outcome, run.Run | Diverged):
                row = trials.add(point, seed, outcome)
                if row["error"] is None:
                    held = f", {100 * row[_HELD_OUT_SCORE]:.1f}% on that of held out ones" if search.hold_out else ""
                    seen = f"{100 * row['seen_validation']:.1f}% on seen clients' validation"
                    say(console, f"{spec.label}: {seen}{held}")
                elif len(batch) == 1:  # those that are trained beside others tell it themselves
                    say(console, f"{spec.label} failed: {row['error']}")
        trials.write()
        forget_weights(specs, outcomes)
        raise_first(outcomes)
    trials.choose(search.seeds)  # not before: half a search would choose among half of the settings
    trials.write()
    return trials


def _spec(search: Search, point: Settings, data: Federation, seed: int, out: Path, runs: int) -> RunSpec:
    config = search.config
    if search.hold_out:
        c = clients_per_round(config, data)  # as many as where nobody is held out
        data = data.holding_out(search.hold_out)
        config = dataclasses.replace(config, clients_per_round=min(c, data.num_seen))
    config = dataclasses.replace(config, settings=point, seed=seed, partition=data.partition, clients=data.num_clients)
    folder = "-".join(f"{name}_{value}" for name, value in point.items()).replace("/", "_")
    label = f"{in_words(point)} seed {seed}"
    folder_of_seed = seed_folder(out / folder, seed)
    held = search.hold_out > 0
    return resolve(config, data, folder_of_seed, runs=runs, label=label, tunes=True, holds_out=held)


def _protocol(search: Search, data: Federation) -> dict[str, Any]:
    """Return what trials must have in common to be comparable."""
    config = search.config
    by = "seen clients that take no part in training," if search.hold_out else "seen clients"
    return {
        "what": f"grid search by the validation accuracy of {by} at the best round",
        **({_HELD_OUT: search.hold_out} if search.hold_out else {}),
        "method": config.method,
        "dataset": data.name,
        "partition": data.partition,
        "num_clients": data.num_clients,
        "num_seen": data.num_seen,
        "model": resolve_model(config.model, data.input_shape, data.tokens),
        "rounds": config.rounds,
        "clients_per_round": clients_per_round(config, data),
    }


def forget_weights(specs: Sequence[RunSpec], outcomes: Sequence[object]) -> None:
    """Remove the checkpoints of runs that ended: their scores are kept, and nobody needs their models."""
    for spec, outcome in zip(specs, outcomes, strict=True):
        if spec.folder is not None and isinstance(outcome, run.Run | Diverged):
            shutil.rmtree(spec.folder.checkpoints, ignore_errors=True)


def raise_first(outcomes: Sequence[object]) -> None:
    """Raise what kept a run from its end, other than divergence: being stopped, a full disk."""
    for outcome in outcomes:
        if isinstance(outcome, Stopped | PefllError) and not isinstance(outcome, Diverged):
            raise outcome


def check_at_once(number: int) -> None:
    """Raise PefllError where no run could be trained at once."""
    if number < 1:
        raise PefllError(f"{argument('at_once')} is {number}; it must be at least 1", code="PEFLL-X017")


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the items, `size` at a time."""
    check_at_once(size)
    return [items[start : start + size] for start in range(0, len(items), size)]


def in_words(point: Settings) -> str:
    """Return settings for a reader: `client_lr=0.01 server_lr=0.001`."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def trials_table(trials: Trials, seeds: Sequence[int]) -> Table:
    """Return a table of all settings that were tried with these seeds, the best first and in bold."""
    ranking = trials.ranking(seeds)
    names = list(dict.fromkeys(name for point, _ in ranking for name in point))
    whose = "held out" if _HELD_OUT in trials.protocol else "seen"
    title = f"Validation accuracy of {whose} clients, {counted(len(seeds), 'seed')}"
    strangers = [trials.as_new(point, seeds) for point, _ in ranking]
    table = Table(*names, f"{whose} validation, %", title=title, title_justify="left")
    if any(strangers):
        table.add_column("as if new, %")
    for place, (point, values) in enumerate(ranking):
        cells = [str(point.get(name, "")) for name in names]
        cells.append(mean_std_text([100 * value for value in values]) if values else "diverged")
        if any(strangers):
            cells.append(mean_std_text([100 * value for value in strangers[place]]))
        table.add_row(*cells, style="bold" if place == 0 and values else "")
    return table


def advice(trials: Trials, search: Search) -> list[str]:
    """Return a sentence for each hyper-parameter whose best value is the smallest or the largest that was tried.

    Where several settings are equally good, one says so: nothing is known about the direction in which better ones lie.
    """
    ranking = trials.ranking(search.seeds)
    if not ranking or not ranking[0][1]:
        return []
    sentences = []
    equals = [hyperparameters(search.config.method) | point for point in trials.tied(search.seeds)]
    differ = [name for name in equals[0] if any(other[name] != equals[0][name] for other in equals)]
    if differ:
        words = [in_words({name: one[name] for name in differ}) for one in equals]
        sentences.append(f"{first_few(words)} tie: {words[0]} is taken, and nothing tells which is better")
    for name, best in ranking[0][0].items():
        if name in differ:
            continue
        tried = {point[name] for point, _ in ranking if name in point}
        if len(tried) > 1 and isinstance(best, int | float):
            for edge, word in ((min(tried), "smallest"), (max(tried), "largest")):
                if best == edge:
                    sentences.append(f"{name} = {best} is the {word} that was tried: the best may lie beyond it")
    return sentences


def file_name(data: str, method: str, clients: int | str) -> str:
    """Return the name of the file of trials, without its ending; "" for the number of clients for all but that."""
    return f"{Path(data).stem}-{method}-n{clients}"


class TunedSettings(NamedTuple):
    """Hyper-parameters for a method in a cell, and where they are from, in words."""

    settings: Settings
    source: str


def tuned_settings(method: str, data: str, clients: int, folder: Path = TUNED) -> TunedSettings:
    """Return what was found best for a method on a federation.

    What was best for seen clients that take no part in training goes before what was best for those that do, but only
    for as many clients: how much new ones differ from all others depends on how many others there are. A federation
    that nobody tuned on takes what was found for the number of clients that is nearest, of the same data; without that
    either, the method's defaults remain.

    Args:
        method: its name.
        data: the data set's name.
        clients: how many.
        folder: has the files of trials.
    """
    tuned: dict[int, Settings] = {}
    for_new: Settings | None = None
    any_file = re.compile(re.escape(file_name(data, method, "")) + rf"(\d+)({_HOLDING_OUT}.+)?")
    for path in sorted(folder.glob("*.json")):
        named = any_file.fullmatch(path.stem)
        if named is None or not (best := read_json(path)["best"]):
            continue
        if named[2] is None:
            tuned[int(named[1])] = best["settings"]
        elif int(named[1]) == clients:
            for_new = best["settings"]
    if for_new is not None:
        return TunedSettings(for_new, f"tuned at n={clients} for new clients")
    if tuned:
        number = min(tuned, key=lambda number: (abs(math.log(number / clients)), number))
        return TunedSettings(tuned[number], f"tuned at n={number}")
    return TunedSettings({}, "defaults")
