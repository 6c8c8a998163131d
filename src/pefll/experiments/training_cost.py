"""Accuracy of PeFLL and FedAvg over rounds and gigabytes (the paper's `fig:CIFAR10_100` to `fig:femnist`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence, Verdict
from pefll.experiments.experiment import CIFAR10, CIFAR100, FEMNIST, Experiment, Row
from pefll.experiments.pages import markdown_table
from pefll.experiments.results import Result
from pefll.experiments.table1 import Cell
from pefll.methods import build_method
from pefll.methods.contract import Problem
from pefll.methods.pefll import PeFLL
from pefll.models import Network, build_model
from pefll.report import mean_and_std
from pefll.report.plots import LINES, drawing
from pefll.report.runs import MISSING
from pefll.runs.record import GROUPS

Array = npt.NDArray[Any]
CELLS = (*CIFAR10, *CIFAR100, *FEMNIST)
ROWS = (Row("PeFLL", "pefll"), Row("FedAvg", "fedavg"))
INPUTS = {"cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100), "femnist": ((1, 32, 32), 62)}
FLOAT = 4  # bytes per number
UNITS = {"rounds": "rounds", "gigabytes": "GB"}  # of budgets
EXACT = 1e-3  # tolerance, because the formula ignores sample counts and the exchange before the first round


class Curve(NamedTuple):
    """Mean validation accuracy over seeds, at the rounds that all seeds evaluated."""

    rounds: Array  # [e], round of each evaluation
    gigabytes: Array  # [e], sent to and from all clients until this round
    accuracy: dict[str, Array]  # group of clients -> [e], in per cent


def formula_bytes(result: Result) -> int:
    """Return the bytes of a round by the paper's formula: 2c(|θ| + |η_v| + |v|), or 2c|θ| for FedAvg."""
    settings = tuple(sorted(result["settings"].items()))
    values = _values(result["method"], settings, result["dataset"], result["model"], result["num_clients"])
    return int(2 * result["clients_per_round"] * values * FLOAT)


@cache
def _values(method: str, settings: tuple[tuple[str, Any], ...], data: str, model: str, clients: int) -> int:
    """Return how many numbers a client receives in a round; it sends the same number of numbers back."""
    shape, classes = INPUTS[data]
    network = Network(build_model(model, shape, classes))
    built = build_method(method, Problem(network, shape, classes, clients), dict(settings))
    return network.size + (built.phi.size + built.descriptor if isinstance(built, PeFLL) else 0)


def counted_bytes(result: Result) -> float:
    """Return the bytes of a round as counted, to and from clients."""
    return float((result["bytes_down"] + result["bytes_up"]) / result["rounds"])


def curve(results: Sequence[Result]) -> Curve | None:
    """Return the mean curve of all seeds; None if no result has a curve."""
    rows = [{row["round"]: row for row in one["validation"]} for one in results if one.get("validation")]
    if not rows:
        return None
    rounds = sorted(set.intersection(*(set(row) for row in rows)))
    size = mean_and_std([counted_bytes(one) for one in results])[0]
    accuracy = {
        group: 100 * np.mean([[row[at][group] for at in rounds] for row in rows], axis=0)
        for group in GROUPS
        if all(group in row[at] for row in rows for at in rounds)
    }
    return Curve(np.array(rounds), np.array(rounds) * size / 1e9, accuracy)


def differences(first: Curve | None, second: Curve | None, by: str, group: str) -> tuple[Array, Array]:
    """Return budgets [b], and how far `first` is above `second` there [b], in percentage points.

    Budgets are the numbers of rounds or of gigabytes at which `first` was evaluated, within the range of `second`.
    There are none if a curve is missing or does not have the group.

    Args:
        first: a curve.
        second: a curve, which is interpolated linearly.
        by: unit of the budget: rounds or gigabytes.
        group: group of clients.
    """
    known = [one for one in (first, second) if one is not None and group in one.accuracy and len(one.rounds)]
    if len(known) < 2:
        return np.zeros(0), np.zeros(0)
    mine, theirs = (np.asarray(getattr(one, by), dtype=float) for one in known)
    both = (mine >= theirs[0]) & (mine <= theirs[-1])
    mine, accuracy = mine[both], [one.accuracy[group] for one in known]
    return mine, accuracy[0][both] - np.interp(mine, theirs, accuracy[1])


def ahead_verdict(
    text: str, place: str, where: str, first: Curve | None, second: Curve | None, by: str, group: str
) -> Verdict:
    """Return the verdict on a statement that `first` is above `second` at every budget; see `differences`."""
    budgets, points = differences(first, second, by, group)
    if not len(budgets):
        return Verdict(text, place, where, "", "", NOTHING)
    behind = np.flatnonzero(points <= 0)
    note = f"last behind at {budgets[behind[-1]]:,.0f} {UNITS[by]}" if len(behind) else "always"
    share = 100 * float((points > 0).mean())
    return Verdict(text, place, where, f"{share:.0f}% of budgets", note, FAILS if len(behind) else HOLDS)


def _judge(evidence: Evidence) -> list[Verdict]:
    verdicts = []
    for cell in CELLS:
        for row in ROWS:
            text = "Bytes as counted are 2c(|θ| + |η_v| + |v|) a round, and 2c|θ| for FedAvg"
            verdicts.append(_bytes_verdict(text, cell, row.name, evidence.results(row.name, cell.name)))
    for cell in CELLS:
        pefll, fedavg = (curve(evidence.results(row.name, cell.name)) for row in ROWS)
        for by in UNITS:
            text = f"For any budget of {by} PeFLL is better than FedAvg"
            for group in GROUPS:
                place, where = f"fig:{cell.data.upper()}_{cell.clients}", f"{cell.title}: {group}"
                place = "fig:femnist" if cell.data == "femnist" else place
                verdicts.append(ahead_verdict(text, "app:experiments", f"{where} ({place})", pefll, fedavg, by, group))
    return verdicts


def _bytes_verdict(text: str, cell: Cell, row: str, results: Sequence[Result]) -> Verdict:
    where = f"{cell.title}: {row}"
    if not results:
        return Verdict(text, "app:experiments", where, "", "", NOTHING)
    ratios = [counted_bytes(one) / formula_bytes(one) for one in results]
    word = HOLDS if all(abs(ratio - 1) < EXACT for ratio in ratios) else FAILS
    span = f"{min(ratios):.5f} to {max(ratios):.5f} (seeds)"
    return Verdict(text, "app:experiments", where, f"{mean_and_std(ratios)[0]:.5f} of it", span, word)


def _sections(evidence: Evidence) -> list[str]:
    body = []
    for cell in CELLS:
        every = {row.name: evidence.results(row.name, cell.name) for row in ROWS}
        sizes = {name: mean_and_std([counted_bytes(one) for one in some])[0] for name, some in every.items() if some}
        for name, results in every.items():
            if not results:
                body.append([cell.title, name, *[MISSING] * 6])
                continue
            tests = [
                f"{mean_and_std([100 * one['accuracy']['best'][group]['per_sample'] for one in results])[0]:.1f}"
                for group in GROUPS
            ]
            ratio = f"{sizes[name] / sizes['FedAvg']:.2f}" if "FedAvg" in sizes else ""
            body.append(
                [
                    *(cell.title, name, str(len(results)), f"{sizes[name] / 1e6:.2f}"),
                    *(f"{formula_bytes(results[0]) / 1e6:.2f}", ratio, *tests),
                ]
            )
    headings = ["", "", "seeds", "MB a round, counted", "by the formula", "times FedAvg", "seen, %", "unseen, %"]
    return ["## What a round sends, down and up", "", *markdown_table(headings, body)]


def draw_curves(evidence: Evidence, folder: Path) -> list[Path]:
    """Draw the validation accuracy of an experiment's rows against rounds and gigabytes, and return the path."""
    experiment = evidence.experiment
    found = {
        cell.title: {
            row.title or row.name: one
            for row in experiment.rows
            if (one := curve(evidence.results(row.name, cell.name))) is not None and len(one.rounds)
        }
        for cell in experiment.cells
    }
    shown = {title: curves for title, curves in found.items() if curves}
    if not shown:
        return []
    path = folder / f"{experiment.file_stem}.png"
    with drawing(path, (10.5, 2.6 * len(shown) + 0.6)) as figure:
        panels = figure.subplots(len(shown), 2, sharey="row", squeeze=False)
        for (title, curves), (left, right) in zip(shown.items(), panels, strict=True):
            left.set_title(f"{title}: validation accuracy, %")
            for axes, by, unit in ((left, "rounds", "round"), (right, "gigabytes", "GB, down and up")):
                axes.grid(axis="y")
                axes.set_xlabel(unit)
                for (name, one), colour in zip(curves.items(), LINES, strict=False):
                    for group, style in (("seen", "-"), ("unseen", "--")):
                        if group in one.accuracy:
                            label = f"{name}, {group}"
                            axes.plot(getattr(one, by), one.accuracy[group], style, color=colour, lw=1.4, label=label)
                axes.set_xlim(left=0)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=4)
    return [path]


EXPERIMENT = Experiment(
    name="cost",
    title="What training costs: rounds and gigabytes",
    about="The runs of Table 1. The paper draws test accuracy during training; our results have validation accuracy. "
    "FedAvg's local steps were tuned, so its clients compute less per round at n=500 and 1000. On CIFAR-100 the "
    "embedding network is linear and small.",
    cells=CELLS,
    rows=ROWS,
    judge=_judge,
    sections=_sections,
    draw=draw_curves,
    stem="training_cost",
)
