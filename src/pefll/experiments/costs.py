"""For each method, what a new client's model costs, and how accurate it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, read_json, write_csv, write_whole
from pefll.core.progress import monitor
from pefll.core.wording import counted
from pefll.experiments.results import (
    TOLD,
    Result,
    figures,
    heading,
    in_per_cent,
    metric_of,
    of_experiments,
    options_of,
    read_results,
)
from pefll.experiments.table1 import TITLES
from pefll.methods import build_method, hyperparameters
from pefll.report import mean_std_text
from pefll.report.table import new_table
from pefll.runs.config import Config
from pefll.runs.federations import data_of_python, federation_of
from pefll.runs.problem import describe_problem
from pefll.runs.record import RunFolder, figures_in, metric_word, run_folders
from pefll.tasks.names import task_of, with_labels_of
from pefll.training.cost import NewClientCost, cost_of_median_client

# Titles of all methods, in the order of the tables: the rows of Table 1 first.
NAMES = TITLES | {
    "odpfl-hn": "ODPFL-HN",
    "ditto": "Ditto",
    "apfl": "APFL",
    "fedper": "FedPer",
    "lg-fedavg": "LG-FedAvg",
    "fedbabu": "FedBABU",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
}
# What a result has; older results have no precision.
_NEEDED = ("dataset", "partition", "num_clients", "num_unseen", "model", "rounds", "method", "settings", "seed")


class MethodCost(NamedTuple):
    """The results of a method, and what it costs to make a model for a new client.

    Attributes:
        results: results of runs that differ only by seed.
        cost: cost for one new client of the first run.
    """

    results: list[Result]
    cost: NewClientCost

    @property
    def title(self) -> str:
        """The method's title."""
        return NAMES.get(self.method, self.method)

    def title_among(self, others: Sequence[MethodCost]) -> str:
        """The method's title, with the settings in which rows of the same method differ."""
        mine, namesakes = self.results[0], [other.results[0] for other in others if other.method == self.method]
        names = [name for name in mine["settings"] if len({str(one["settings"].get(name)) for one in namesakes}) > 1]
        words = [f"{name} {mine['settings'][name]}" for name in names]
        differing = (name for name in ("precision", "rounds") if len({one.get(name) for one in namesakes}) > 1)
        words += [str(mine.get(name)) for name in differing]
        of_rows = [options_of(one) for one in namesakes]
        words += [
            f"{name} {options_of(mine).get(name, 'default')}"
            for name in dict.fromkeys(name for options in of_rows for name in options if name not in TOLD)
            if len({options.get(name) for options in of_rows}) > 1
        ]
        return ", ".join([self.title, *words])

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.results[0]["method"])

    @property
    def data(self) -> str:
        """The federation as text."""
        return f"{self.results[0]['dataset']}, {self.results[0]['num_clients']} clients"

    @property
    def figure(self) -> str:
        """The metric that chooses the best round, on unseen clients: mean ± standard deviation over seeds."""
        return mean_std_text(figures(self.results, "unseen"), in_per_cent(self.results[0]))


class Finished(NamedTuple):
    """A finished run: its result and its config."""

    result: Result
    config: Config


def read_any(paths: Sequence[Path]) -> list[Finished]:
    """Return the finished runs in paths: result files, folders of result files, or run folders."""
    found: list[Finished] = []
    for path in paths:
        if path.is_file():
            found.append(_of_result(read_json(path), path))
        elif path.is_dir() and (results := read_results(path)) and not RunFolder(path).config_file.is_file():
            found += [_of_result(result, path) for result in results]
        else:
            found += [_of_run(folder) for folder in run_folders(path)]
    return found


def _of_run(folder: RunFolder) -> Finished:
    folder.check_is_run()
    summary = folder.summary()
    if summary is None:
        raise PefllError(f"{folder.path} is not finished; continue it with {folder.going_on}", code="PEFLL-X001")
    config = Config.load(folder.config_file, folder.trained_with())
    _check_has_data(data_of_python(config), folder.path)
    return Finished(_checked(summary, folder.path), config)


def _of_result(content: Any, path: Path) -> Finished:
    result = _checked(content, path)
    options = options_of(result)
    _check_has_data(not result.get("command", "earlier results have one"), path)
    table: dict[str, Any] = {name: options[name] for name in _OF_SAMPLES if name in options}
    config = Config(
        method=result["method"],
        settings=result["settings"],
        data=options.get("data") or result["dataset"],
        partition=result["partition"],
        clients=result["num_clients"],
        unseen=result["num_unseen"] / result["num_clients"],
        model=result["model"],
        seed=result["seed"],
        task=options.get("task", ""),
        min_samples=int(options.get("min_samples", 1)),
        **table,
    )
    return Finished(result, config)


# Options of a command that are texts, and say how a table becomes samples of clients.
_OF_SAMPLES = (
    *("label", "client_column", "features", "drop", "treat", "encode", "missing", "time_column", "unseen_clients"),
)


def _check_has_data(in_python: bool, path: Path) -> None:
    """Raise PefllError if the data of a run was given in Python, so that its clients cannot be made again."""
    if in_python:
        raise PefllError(
            f"{path} is from data that was given in Python, so that a new client's cost cannot be measured; train on a "
            "data set or a file (`pefll train --data FILE`)",
            code="PEFLL-X019",
        )


def _checked(result: Any, path: Path) -> Result:
    if not isinstance(result, dict) or not set(_NEEDED) <= result.keys() or not figures_in(result):
        raise PefllError(f"{path} is not a result file; make one with `pefll results add RUN`", code="PEFLL-X002")
    if result.get("split", "test") != "test":
        raise PefllError(
            f"{path} is from `pefll tune` and has no test accuracy; give the result of a training run",
            code="PEFLL-X003",
        )
    # Older results lack newer hyper-parameters, which then have their defaults.
    return result | {"settings": hyperparameters(result["method"]) | result["settings"]}


def method_costs(
    runs: Sequence[Finished], data_dir: Path | None = None, console: Console | None = None
) -> list[MethodCost]:
    """Return for each method what a new client costs. Among runs that differ only by seed, the first is used.

    Args:
        runs: finished runs; their weights are not needed.
        data_dir: folder of data sets; None for the folder that each run's config names.
        console: console for progress.
    """
    configs = {id(one.result): one.config for one in runs}
    groups = of_experiments([one.result for one in runs])
    listed = []
    with monitor(console, "counting", len(groups)) as watch:
        for done, group in enumerate(groups, start=1):
            config = configs[id(group[0])]
            if data_dir is not None:
                config = dataclasses.replace(config, data_dir=str(data_dir))
            listed.append(MethodCost(group, _cost(config)))
            watch.at(done, listed[-1].title)
    return listed


def _cost(config: Config) -> NewClientCost:
    # What a message has and what a client computes does not depend on the user's loss and metrics.
    task = task_of(config.task, for_predictions=True) if config.task else None
    federation = federation_of(config, None)
    federation = with_labels_of(task, federation) if task else federation
    problem, _ = describe_problem(federation, config.model, task)
    return cost_of_median_client(build_method(config.method, problem, config.settings), federation, config.seed)


def _headings(group: Sequence[MethodCost]) -> tuple[str, ...]:
    return ("method", heading(group[0].results[0], "unseen"), "exchanges", "down", "up", "FLOPs", "seconds")


def _cells(row: MethodCost, group: Sequence[MethodCost]) -> list[str]:
    cost = row.cost
    sent = [short(number) + "B" for number in (cost.bytes_down, cost.bytes_up)]
    numbers = [str(cost.exchanges), *sent, short(cost.flops).strip(), f"{cost.seconds:.3g}"]
    return [row.title_among(group), row.figure, *numbers]


def short(value: float) -> str:
    """Return a number with three digits and a unit prefix: `1.23 M`."""
    prefixes = ["", "k", "M", "G", "T"]
    while abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}"


def _by_federation(rows: Sequence[MethodCost]) -> dict[str, list[MethodCost]]:
    """Return the rows by federation, sorted by data set, number of clients, and the paper's order of methods."""
    order = list(NAMES)

    def place(row: MethodCost) -> tuple[str, int, int]:
        paper_row = order.index(row.method) if row.method in order else len(order)
        return row.results[0]["dataset"], row.results[0]["num_clients"], paper_row

    groups: dict[str, list[MethodCost]] = {}
    for row in sorted(rows, key=place):
        # Figures of several metrics are not in one column.
        metric = "" if (name := metric_of(row.results[0])) == "per_sample" else f", {metric_word(name)}"
        title = f"{row.data}: a new client with {counted(row.cost.samples, 'sample')}{metric}"
        groups.setdefault(title, []).append(row)
    return groups


def new_client_tables(rows: Sequence[MethodCost]) -> list[Table]:
    """Return one terminal table per federation."""
    tables = []
    for title, group in _by_federation(rows).items():
        table = new_table(title)
        for text in _headings(group):
            table.add_column(text, justify="left" if text == "method" else "right", no_wrap=True)
        for row in group:
            table.add_row(*_cells(row, group))
        tables.append(table)
    return tables


def write_costs(rows: Sequence[MethodCost], target: Path) -> list[Path]:
    """Write the tables as Markdown and CSV, and return the paths.

    Args:
        rows: rows of the tables.
        target: path of both files, without extension.
    """
    lines = [
        "# What a new client pays for its model",
        "",
        "For the unseen client with the median number of training samples: messages to the client, bytes down to the "
        "client and up to the server, floating point operations (convolutions and products) on the client's device, "
        "and seconds on one core, including the server's work. What a client computes for itself is not sent. Local "
        "has no server.",
    ]
    for title, group in _by_federation(rows).items():
        headings = _headings(group)
        lines += ["", f"## {title}", "", "| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
        lines += ["| " + " | ".join(_cells(row, group)) + " |" for row in group]
    make_folder(target.parent)
    paths = [target.with_name(f"{target.name}.{ending}") for ending in ("md", "csv")]
    write_whole(paths[0], ("\n".join(lines) + "\n").encode())
    write_csv(paths[1], (_csv_row(row) for row in rows))
    return paths


def _csv_row(row: MethodCost) -> dict[str, Any]:
    one = row.results[0]
    named = {key: one[key] for key in ("dataset", "num_clients", "method")}
    return named | {"seeds": len(row.results), "unseen": row.figure} | row.cost._asdict()
