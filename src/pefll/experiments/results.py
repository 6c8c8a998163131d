"""Finished runs as small JSON files with their provenance, and the tables that are made from them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, read_json, write_json
from pefll.experiments.table1 import PAPER
from pefll.methods import hyperparameters
from pefll.report import mean_and_std
from pefll.report.runs import read_run
from pefll.runs.config import Config
from pefll.runs.record import GROUPS, RunFolder, own_seconds

# Runs that differ in none of these are one setting with several seeds.
SAME = (
    *("dataset", "partition", "num_clients", "num_seen", "clients_per_round", "rounds"),
    *("method", "settings", "model", "precision"),
)


def collect(folder: RunFolder, target: Path) -> Path:
    """Write a finished run as one small JSON file: its summary, and its curves without what a reader does not need.

    Args:
        folder: of the run.
        target: a folder for results.

    Returns:
        The file, named after what was run. A file that holds another run is left alone, and a longer name is taken.
    """
    run = read_run(folder)
    summary = run.summary
    if summary is None:
        raise PefllError(f"{folder.path} is not finished; go on with {folder.going_on}", code="PEFLL-X001")
    if summary.get("split", "test") != "test":
        raise PefllError(
            f"{folder.path} was made to choose hyper-parameters; it has no test accuracy", code="PEFLL-X008"
        )
    history = [
        {"round": row["round"]} | {group: round(row[group]["per_sample"], 4) for group in GROUPS if row.get(group)}
        for row in run.history
    ]
    name = "-".join(str(summary[key]) for key in ("dataset", "method")) + f"-n{summary['num_clients']}"
    make_folder(target)
    path = _place(target, f"{name}-{_changes(folder)}seed{summary['seed']}", summary)
    write_json(path, summary | {"validation": history})
    return path


def _place(target: Path, name: str, summary: dict[str, Any]) -> Path:
    """Return the first file of that name that is not there yet or holds the same run."""
    endings = itertools.chain(["", f"-rounds{summary['rounds']}"], (f"-{number}" for number in itertools.count(2)))
    same = ("command", "dataset", "partition", "num_clients", "num_seen", "rounds", "clients_per_round")

    def is_the_same(other: dict[str, Any]) -> bool:
        return all(other.get(key) == summary[key] for key in same) and _settings(other) == _settings(summary)

    paths = (target / f"{name}{ending}.json" for ending in endings)
    return next(path for path in paths if not path.exists() or is_the_same(read_json(path)))


def _changes(folder: RunFolder) -> str:
    """Return the hyper-parameters and the precision where they are not the usual ones, for a file name."""
    config = Config.load(folder.config_file, folder.trained_with())
    usual = _usual(config.method)
    changes = [f"{key}_{value}-" for key, value in config.settings.items() if value != usual.get(key)]
    if config.precision not in ("auto", "tf32"):  # what a GPU takes if not told otherwise
        changes.append(f"{config.precision}-")
    return "".join(changes)


def _usual(method: str) -> dict[str, Any]:
    """Return a method's defaults; none for one that this program does not have."""
    try:
        return hyperparameters(method)
    except PefllError:
        return {}


def _settings(result: dict[str, Any]) -> dict[str, Any]:
    """Return all hyper-parameters of a result.

    One that it does not name did not exist when it was made, and had its default's effect.
    """
    named: dict[str, Any] = result.get("settings", {})
    return _usual(str(result.get("method", ""))) | named


def read_results(source: Path) -> list[dict[str, Any]]:
    """Return all finished runs in a folder of results, in the order of their names."""
    found = [read_json(path) for path in sorted(source.glob("*.json"))]
    return [result for result in found if isinstance(result, dict) and "accuracy" in result]


def no_results(source: Path) -> PefllError:
    """Return the error for a folder that should have results."""
    return PefllError(f"there are no results in {source}; `pefll results add RUN` puts some there", code="PEFLL-X009")


def markdown_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per setting, mean ± std over its seeds, the paper's number beside it."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        whole = result | {"settings": _settings(result)}
        rows.setdefault(json.dumps([whole.get(key) for key in SAME], sort_keys=True), []).append(result)
    lines = [
        "| data, clients | method | seeds | seen, % | paper | unseen, % | paper | seconds | command (and `--seed N`) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    commands = {name: min((_command(result) for result in group), key=len) for name, group in rows.items()}
    for name, group in sorted(
        rows.items(), key=lambda row: (row[1][0]["dataset"], row[1][0]["num_clients"], len(commands[row[0]]))
    ):
        one, command = group[0], commands[name]
        paper = PAPER.get((one["dataset"], one["num_clients"]), {}).get(one["method"])
        cells = [f"{one['dataset']}, {one['num_clients']}", one["method"], str(len(group))]
        for place, who in enumerate(GROUPS):
            scored = [result["accuracy"]["best"][who] for result in group]
            cells.append(spread([100 * score["per_sample"] for score in scored if score]))
            cells.append(f"{paper[2 * place]:.1f} ± {paper[2 * place + 1]:.1f}" if paper else "")
        # Runs that others slowed down tell nothing about how long one takes.
        own = [_seconds(one) for one in group if own_seconds(one)]
        time = f"{mean_and_std(own)[0]:.0f}" if own else ""
        lines.append("| " + " | ".join([*cells, time, f"`{command}`"]) + " |")
    return "\n".join(lines)


def _seconds(result: dict[str, Any]) -> float:
    """Return how long a run was trained; without rounds, as Local's are, clients train alone as they are tested."""
    parts = ("test_seconds",) if result.get("rounds") == 0 else ("train_seconds", "eval_seconds")
    return math.fsum(result[part] for part in parts)


def _command(result: dict[str, Any]) -> str:
    """Return the command that made a result, without its seed and without hyper-parameters that are the defaults."""
    command = str(result["command"]).replace(f" --seed {result['seed']}", "")
    for name, value in _usual(result["method"]).items():
        command = command.replace(f" --set {name}={value} ", " ")
    return command.replace(" --precision tf32", "")  # which is what a GPU takes


def spread(values: Sequence[float]) -> str:
    """Return a mean with its standard deviation, where there is one, to one digit; a dash for no values."""
    if not values:
        return "—"
    mean, std = mean_and_std(values)
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"
