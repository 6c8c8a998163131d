"""The trials of a grid search: their file, which of them count, and their ranking."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from pefll.core.errors import Diverged, PefllError
from pefll.core.files import make_folder, read_json, write_json
from pefll.core.wording import argument, counted
from pefll.experiments.conditions import Conditions
from pefll.methods import hyperparameters
from pefll.report import mean_and_std, mean_std_text
from pefll.runs.record import figures_in, is_share, metric_word
from pefll.training import run

Settings = dict[str, Any]
TUNED = Path("results/tune")
HELD_OUT, HELD_OUT_SCORE = "hold_out", "held_out_validation"
BOTH, BOTH_SCORE = "both", "held_out_and_seen_validation"  # the mean of both accuracies
# What a file of an earlier version, or of plain classification, does not say.
_UNSAID = {"judge": None, "metric": "per_sample", "smaller_is_better": False, "task": ""}
HOLDING_OUT = "-holding-out-"  # in the names of trial files: DATA-METHOD-nCLIENTS-holding-out-SHARE.json
# Summary fields copied into a trial.
_KEPT = (
    *("best_round", "train_seconds", "eval_seconds", "wall_seconds", "test_seconds", "lockstep", "timing", "device"),
    *("precision", "local_steps", "commit", "version", "torch", "data_sha256", "finished"),
)


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

    def missing(self, points: Sequence[Settings], seeds: Sequence[int]) -> list[tuple[Settings, int]]:
        """Return the settings and seeds of a search that have no trial yet."""
        tried = {(self._whole(row["settings"]), row["seed"]) for row in self.counted}
        wanted = itertools.product(points, seeds)
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
            if HELD_OUT in self.protocol:
                row[HELD_OUT_SCORE] = (groups["unseen"] or {}).get(self.metric)
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
            if HELD_OUT in self.protocol:
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
        if self.protocol.get("judge") == BOTH:
            return BOTH_SCORE
        return HELD_OUT_SCORE if HELD_OUT in self.protocol else "seen_validation"

    def _value(self, row: dict[str, Any]) -> float | None:
        """Return a trial's score, or None if it diverged or if the metric is not defined."""
        if self._score != BOTH_SCORE:
            return row.get(self._score)
        both = row["seen_validation"], row.get(HELD_OUT_SCORE)
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


def in_words(point: Settings) -> str:
    """Return settings as text: `client_lr=0.01 server_lr=0.001`."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def trials_table(trials: Trials, seeds: Sequence[int]) -> Table:
    """Return a table of all settings that were tried with these seeds, the best first and in bold."""
    ranking = trials.ranking(seeds)
    names = list(dict.fromkeys(name for point, _ in ranking for name in point))
    whose = "held out" if HELD_OUT in trials.protocol else "seen"
    if trials.protocol.get("judge") == BOTH:
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
    any_file = re.compile(re.escape(file_name(data, method, "")) + rf"(\d+)({HOLDING_OUT}.+)?")
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
