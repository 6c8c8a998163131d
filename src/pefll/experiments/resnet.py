"""PeFLL and FedAvg with ResNet-20 as client model: accuracy over rounds (the paper's `fig:ResNet_CIFAR10`)."""

from __future__ import annotations

import numpy as np

from pefll.experiments.evidence import Evidence, Verdict
from pefll.experiments.experiment import CIFAR10, Compared, Experiment, Panel, Point, Row, Statement
from pefll.experiments.pages import markdown_table
from pefll.experiments.table1 import Cell
from pefll.experiments.training_cost import Curve, ahead_verdict, curve, draw_curves
from pefll.report.runs import MISSING
from pefll.runs.record import GROUPS

PLACE = "fig:ResNet_CIFAR10"
PAPER_ROUNDS = 5000
# A GPU computes about 2,400 client steps/s with 5 clients a round and 6,000 with 50. With these rounds, a run of PeFLL
# takes 3.5 minutes at n=100, and 5.5 at n=500 and n=1000.
ROUNDS = {100: 2000, 500: 1200, 1000: 800}
CELLS = tuple(cell._replace(model="resnet20", tag="resnet20", rounds=ROUNDS[cell.clients]) for cell in CIFAR10)
# PeFLL has the learning rates of its published code. FedAvg has the settings of Table 1.
METHODS = {"PeFLL": ("pefll", {"client_lr": 2e-3, "server_lr": 2e-4}), "FedAvg": ("fedavg", {})}
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the rounds, for the table of curves


def _row(method: str, cell: Cell) -> str:
    return f"{method}-{cell.clients}"


def _curves(evidence: Evidence, cell: Cell) -> dict[str, Curve | None]:
    return {method: curve(evidence.results(_row(method, cell), cell.name)) for method in METHODS}


def _sections(evidence: Evidence) -> list[str]:
    body = []
    for cell in CELLS:
        curves = _curves(evidence, cell)
        known = [one for one in curves.values() if one is not None]
        if not known:
            continue
        last = cell.rounds_of(evidence.rounds)
        for share in SHARES:
            at = known[0].rounds[np.abs(known[0].rounds - share * last).argmin()]
            for group in GROUPS:
                figures = [MISSING if one is None else _at(one, at, group) for one in curves.values()]
                body.append([cell.title, f"{at:,}", group, *figures])
    title = ["## Validation accuracy over rounds", ""]
    return [*title, *(markdown_table(["", "round", "clients", *METHODS], body) if body else ["No results yet."])]


def _at(one: Curve, at: int, group: str) -> str:
    return f"{np.interp(at, one.rounds, one.accuracy[group]):.1f}" if group in one.accuracy else MISSING


def _judge(evidence: Evidence) -> list[Verdict]:
    verdicts = []
    text = "During the whole training PeFLL is better than FedAvg (validation accuracy)"
    for cell in CELLS:
        first, second = _curves(evidence, cell).values()
        for group in GROUPS:
            where = f"{cell.title}: {group}"
            verdicts.append(ahead_verdict(text, PLACE, where, first, second, "rounds", group))
    return verdicts


EXPERIMENT = Experiment(
    name="resnet",
    title="ResNet-20 as client model",
    about="CIFAR-10 with the clients of Table 1. The client model is ResNet-20 without batch normalisation, 270,906 "
    f"parameters. The paper trains for {PAPER_ROUNDS:,} rounds; we train for "
    + ", ".join(f"{rounds:,} (n={n})" for n, rounds in ROUNDS.items())
    + ", so our curves end earlier. PeFLL has the learning rates of its published code (2e-3 and 2e-4). FedAvg has the "
    "settings of Table 1. No setting was searched for this model. The embedding network is the convolutional one of "
    "Table 1. The paper has a figure without numbers: it draws test accuracy during training, and our results have "
    "validation accuracy. There are three seeds at n=100, and one at n=500 and n=1000.",
    cells=CELLS,
    rows=tuple(
        Row(_row(name, cell), method, settings, cell.name, name, seeds=() if cell.clients == 100 else (0,))
        for cell in CELLS
        for name, (method, settings) in METHODS.items()
    ),
    panels=[
        Panel(
            f"Test accuracy of {group} clients",
            "",
            [f"{cell.title}, {cell.rounds:,} rounds" for cell in CELLS],
            [(method, [Point(_row(method, cell), cell, group) for cell in CELLS]) for method in METHODS],
        )
        for group in GROUPS
    ],
    statements=(
        Statement(
            "PeFLL is better than FedAvg (test accuracy)",
            PLACE,
            [
                Compared(Point(_row("PeFLL", cell), cell, group), Point(_row("FedAvg", cell), cell, group))
                for cell in CELLS
                for group in GROUPS
            ],
        ),
    ),
    sections=_sections,
    judge=_judge,
    draw=draw_curves,
)
