"""Result files, which are small JSON files about finished runs with their provenance; and tables of results."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, read_json, write_json
from pefll.experiments.table1 import PAPER
from pefll.methods import hyperparameters, personal_settings
from pefll.report import mean_and_std, mean_std_text
from pefll.report.runs import read_run
from pefll.runs.config import Config
from pefll.runs.record import GROUPS, RunFolder, own_seconds

Result = dict[str, Any]  # the content of a result file, or a run's summary
# Results that agree in these fields differ only by seed.
SAME = (
    *("dataset", "partition", "num_clients", "num_seen", "clients_per_round", "rounds"),
    *("method", "settings", "model", "precision", "prior_clients"),
)

_UNSAFE = re.compile(r"[^\w.-]+")  # what a file name must not have
_USUAL_MODELS = ("auto", "lenet", "cnn", "mlp", "lstm")  # those that --model auto chooses


def collect(
    folder: RunFolder, target: Path, measured: dict[str, Any] | None = None, evaluated: Result | None = None
) -> Path:
    """Write the summary and the validation curves of a finished run as one JSON file, and return its path.

    The file's name has the data, method, clients, settings and seed, a Dirichlet partition, and a model that is not
    chosen by default. A file of another run is never overwritten; the new file gets a longer name.

    Args:
        folder: of the run.
        target: the folder of results.
        measured: measurements of experiments, by name; those in an existing file of the same run are kept.
        evaluated: the run's summary with other personal hyper-parameters; None for the run as trained.
    """
    run = read_run(folder)
    summary = run.summary if evaluated is None else evaluated
    if summary is None:
        raise PefllError(f"{folder.path} is not finished; continue it with {folder.going_on}", code="PEFLL-X001")
    if summary.get("split", "test") != "test":
        raise PefllError(
            f"{folder.path} is a run of `pefll tune` and has no test accuracy; give a training run", code="PEFLL-X008"
        )
    history = [
        {"round": row["round"]} | {group: round(row[group]["per_sample"], 4) for group in GROUPS if row.get(group)}
        for row in run.history
    ]
    name = "-".join(str(summary[key]) for key in ("dataset", "method")) + f"-n{summary['num_clients']}"
    if summary["partition"].startswith("dirichlet"):  # not the usual partition of the data set
        name += "-" + re.sub(r"[^\w.]+", "_", summary["partition"])
    if summary["model"] not in _USUAL_MODELS:
        name += "-" + re.sub(r"[^\w.]+", "_", summary["model"])
    if summary.get("prior_clients"):
        name += f"-prior_{summary['prior_clients']}"
    make_folder(target)
    # A method of one's own has a colon in its name, and settings may have other letters that file systems refuse.
    path = _place(target, _UNSAFE.sub("_", f"{name}-{_changes(folder, summary)}seed{summary['seed']}"), summary)
    known = read_json(path).get("measured", {}) if path.exists() else {}
    measured = known | (measured or {})
    # Methods, models and data of experiments have names, so that they need no fingerprints.
    content = {name: value for name, value in summary.items() if name != "fingerprints"}
    write_json(path, content | {"validation": history} | ({"measured": measured} if measured else {}))
    return path


def _place(target: Path, name: str, summary: Result) -> Path:
    """Return the path for a result: `name`, with a suffix if this name is taken by the result of another run."""
    endings = itertools.chain(["", f"-rounds{summary['rounds']}"], (f"-{number}" for number in itertools.count(2)))
    same = ("command", "dataset", "partition", "num_clients", "num_seen", "rounds", "clients_per_round")

    def is_same_run(other: Result) -> bool:
        return all(other.get(key) == summary[key] for key in same) and _settings(other) == _settings(summary)

    paths = (target / f"{name}{ending}.json" for ending in endings)
    return next(path for path in paths if not path.exists() or is_same_run(read_json(path)))


def _changes(folder: RunFolder, summary: Result) -> str:
    """Return hyper-parameters and precision that differ from the defaults, for a file name."""
    config = Config.load(folder.config_file, folder.trained_with())
    defaults = _defaults(config.method)
    # The summary may be of an evaluation with other settings than those of training.
    personal = _personal(config.method)
    settings = config.settings | {key: value for key, value in summary["settings"].items() if key in personal}
    changes = [f"{key}_{value}-" for key, value in settings.items() if value != defaults.get(key)]
    if config.precision not in ("auto", "tf32"):  # tf32 is the default of a GPU
        changes.append(f"{config.precision}-")
    return "".join(changes)


def _defaults(method: str) -> dict[str, Any]:
    """Return the default hyper-parameters of a method; empty for an unknown method."""
    try:
        return hyperparameters(method)
    except PefllError:
        return {}


def _personal(method: str) -> tuple[str, ...]:
    """Return the hyper-parameters that may differ from those of training; empty for an unknown method."""
    try:
        return personal_settings(method)
    except PefllError:
        return ()


def _settings(result: Result) -> dict[str, Any]:
    """Return all hyper-parameters of a result; those that it does not name have their defaults."""
    named: dict[str, Any] = result.get("settings", {})
    return _defaults(str(result.get("method", ""))) | named


def read_results(source: Path) -> list[Result]:
    """Return all results in a folder, sorted by file name."""
    found = [read_json(path) for path in sorted(source.glob("*.json"))]
    return [result for result in found if isinstance(result, dict) and "accuracy" in result]


def no_results(source: Path) -> PefllError:
    """Return the error for a folder without results."""
    return PefllError(f"there are no results in {source}; add some with `pefll results add RUN`", code="PEFLL-X009")


def accuracies(results: Sequence[Result], group: str) -> list[float]:
    """Return the test accuracy at the best round in per cent, for each result that has this group of clients."""
    scores = [result["accuracy"]["best"][group] for result in results]
    return [100 * score["per_sample"] for score in scores if score]


def markdown_table(results: Sequence[Result]) -> str:
    """Return a Markdown table: one row per setting, with the mean ± std over seeds and the paper's numbers."""
    rows: dict[str, list[Result]] = {}
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
            cells.append(mean_std_text(accuracies(group, who)))
            cells.append(f"{paper[2 * place]:.1f} ± {paper[2 * place + 1]:.1f}" if paper else "")
        # The time counts only runs that did not share the device with others.
        own = [_seconds(one) for one in group if own_seconds(one)]
        time = f"{mean_and_std(own)[0]:.0f}" if own else ""
        lines.append("| " + " | ".join([*cells, time, f"`{command}`"]) + " |")
    return "\n".join(lines)


def _seconds(result: Result) -> float:
    """Return the training time. A method without rounds (Local) trains clients during the test."""
    parts = ("test_seconds",) if result.get("rounds") == 0 else ("train_seconds", "eval_seconds")
    return math.fsum(result[part] for part in parts)


def _command(result: Result) -> str:
    """Return the command of a result, without the seed and without default settings."""
    command = str(result["command"]).replace(f" --seed {result['seed']}", "")
    for name, value in _defaults(result["method"]).items():
        command = command.replace(f" --set {name}={value} ", " ")
    command = command.replace(" --precision tf32", "")  # the default of a GPU
    return f"{command}; {result['evaluation']}" if "evaluation" in result else command
