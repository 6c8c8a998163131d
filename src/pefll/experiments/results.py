"""Finished runs as small JSON files with their provenance, and the tables that are made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pefll.config import Config
from pefll.errors import PefllError
from pefll.files import read_json, write_json
from pefll.methods import hyperparameters
from pefll.record import GROUPS, RunFolder
from pefll.report import mean_and_std

# The paper's Table 1, in per cent: (dataset, clients) -> method -> (seen mean, seen std, unseen mean, unseen std).
PAPER: dict[tuple[str, int], dict[str, tuple[float, float, float, float]]] = {
    ("cifar10", 100): {
        "local": (82.2, 0.6, 81.6, 0.7),
        "fedavg": (47.5, 0.5, 48.6, 0.3),
        "pefll": (89.0, 0.8, 89.3, 2.2),
    },
    ("cifar10", 500): {
        "local": (70.9, 0.5, 70.6, 1.8),
        "fedavg": (50.4, 0.6, 49.6, 1.0),
        "pefll": (88.9, 0.4, 88.9, 0.6),
    },
    ("cifar10", 1000): {
        "local": (65.5, 0.7, 65.5, 0.5),
        "fedavg": (51.9, 0.7, 51.7, 0.7),
        "pefll": (87.8, 0.4, 88.5, 0.3),
    },
    ("cifar100", 100): {
        "local": (39.4, 0.2, 38.7, 0.9),
        "fedavg": (16.4, 0.4, 17.1, 0.9),
        "pefll": (56.0, 0.3, 35.2, 1.4),
    },
    ("cifar100", 500): {
        "local": (19.7, 0.2, 19.9, 1.1),
        "fedavg": (20.2, 0.1, 19.3, 2.0),
        "pefll": (43.2, 0.8, 38.1, 0.4),
    },
    ("cifar100", 1000): {
        "local": (11.3, 0.1, 11.0, 0.5),
        "fedavg": (20.2, 0.2, 20.5, 1.0),
        "pefll": (40.9, 0.6, 38.4, 0.9),
    },
}


# Runs that differ in none of these are one setting with several seeds.
SAME = (
    *("dataset", "partition", "num_clients", "clients_per_round", "rounds"),
    *("method", "settings", "model", "precision"),
)


def collect(folder: RunFolder, target: Path) -> Path:
    """Write a finished run as one small JSON file: its summary, and its curves without what a reader does not need.

    Args:
        folder: of the run.
        target: a folder for results.

    Returns:
        The file, named after what was run.
    """
    folder.check_is_run()
    summary = folder.summary()
    if summary is None:
        raise PefllError(f"{folder.path} is not finished; go on with `pefll train --resume {folder.path}`")
    history = [
        {"round": row["round"]} | {group: round(row[group]["per_sample"], 4) for group in GROUPS if row[group]}
        for row in folder.history()
    ]
    name = "-".join(str(summary[key]) for key in ("dataset", "method")) + f"-n{summary['num_clients']}"
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{name}-{_changes(folder)}seed{summary['seed']}.json"
    write_json(path, summary | {"validation": history})
    return path


def _changes(folder: RunFolder) -> str:
    """Return the hyper-parameters and the precision where they are not the usual ones, for a file name."""
    config = Config.load(folder.config_file)
    usual = hyperparameters(config.method)
    changes = [f"{key}_{value}-" for key, value in config.settings.items() if value != usual.get(key)]
    if config.precision not in ("auto", "tf32"):  # what a GPU takes if not told otherwise
        changes.append(f"{config.precision}-")
    return "".join(changes)


def read_results(source: Path) -> list[dict[str, Any]]:
    """Return all finished runs in a folder of results, in the order of their names."""
    found = [read_json(path) for path in sorted(source.glob("*.json"))]
    return [result for result in found if isinstance(result, dict) and "accuracy" in result]


def markdown_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per setting, mean ± std over its seeds, the paper's number beside it."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(json.dumps([result.get(key) for key in SAME], sort_keys=True), []).append(result)
    lines = [
        "| data, clients | method | seeds | seen, % | paper | unseen, % | paper | seconds | command (and `--seed N`) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    # Some may have said what others left to the defaults.
    commands = {
        name: min((str(result["command"]).replace(f" --seed {result['seed']}", "") for result in group), key=len)
        for name, group in rows.items()
    }
    for name, group in sorted(
        rows.items(), key=lambda row: (row[1][0]["dataset"], row[1][0]["num_clients"], len(commands[row[0]]))
    ):
        one, command = group[0], commands[name]
        paper = PAPER.get((one["dataset"], one["num_clients"]), {}).get(one["method"])
        cells = [f"{one['dataset']}, {one['num_clients']}", one["method"], str(len(group))]
        for place, who in enumerate(GROUPS):
            scored = [result["accuracy"]["best"][who] for result in group]
            cells.append(_spread([100 * score["per_sample"] for score in scored if score]))
            cells.append(f"{paper[2 * place]:.1f} ± {paper[2 * place + 1]:.1f}" if paper else "")
        seconds = mean_and_std([result["train_seconds"] + result["eval_seconds"] for result in group])[0]
        together = max(result.get("lockstep", 1) for result in group)
        time = f"{seconds:.0f}" if together == 1 else f"{seconds:.0f} ({together} at once)"
        lines.append("| " + " | ".join([*cells, time, f"`{command}`"]) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "—"
    mean, std = mean_and_std(values)
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"
