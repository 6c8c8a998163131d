"""The next character in Shakespeare's plays, with LEAF's LSTM (the paper's `fig:shakespeare_rounds`)."""

from __future__ import annotations

import numpy as np

from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence, Verdict, signed
from pefll.experiments.experiment import Experiment, Point, Row, panel
from pefll.experiments.pages import markdown_table
from pefll.experiments.table1 import ROUNDS as PAPER_ROUNDS
from pefll.experiments.table1 import Cell
from pefll.experiments.training_cost import (
    Array,
    Curve,
    ahead_verdict,
    counted_bytes,
    curve,
    differences,
    draw_curves,
)
from pefll.report import mean_and_std
from pefll.report.runs import MISSING
from pefll.runs.record import GROUPS

# All roles with enough text. LEAF's experiments have 10 clients in a round.
CELL = Cell("shakespeare_tenth", 689, "natural", "689 roles", 342_381, clients_per_round=10, model="lstm", rounds=500)
# A pass over a client's samples is up to 175 steps. Fewer passes of FedRep than usual make a round affordable.
ROWS = (
    Row("PeFLL", "pefll", {"embedding": "lstm"}),
    Row("PeFLL+", "pefll-plus", {"embedding": "lstm"}),
    Row("FedAvg", "fedavg"),
    Row("Per-FedAvg", "per-fedavg"),
    Row("kNN-Per", "knn-per"),
    Row("FedRep", "fedrep", {"head_epochs": 1, "new_epochs": 5}),
)
BASELINE = "FedAvg"
OURS = ("PeFLL", "PeFLL+")  # the other rows are baselines
SIMILAR = 2.0  # percentage points; the paper does not say how close its curves are


def first_reached(one: Curve, by: str, accuracy: float | None) -> float | None:
    """Return the rounds or gigabytes (`by`) after which seen clients first reach an accuracy; None if never."""
    if accuracy is None:
        return None
    reached = np.flatnonzero(one.accuracy["seen"] >= accuracy)
    return float(getattr(one, by)[reached[0]]) if len(reached) else None


def experiment(cell: Cell) -> Experiment:
    """Return the experiment on a federation of texts."""
    return Experiment(
        name="shakespeare",
        title="Shakespeare: the next character",
        about="LEAF's task: the next of 80 characters after a text of 80, one client per role. We take every tenth "
        "sample. Clients run LEAF's LSTM (two layers of 256). The embedding network of PeFLL and PeFLL+ is the same "
        "LSTM, with the label as one more time step. Each role's text is split by time. FedRep makes fewer passes than "
        f"by default. The paper trains for {PAPER_ROUNDS:,} rounds; we train for {cell.rounds_of(PAPER_ROUNDS):,}, so "
        "our curves end earlier. The paper has two figures without numbers: they draw test accuracy during training, "
        "and our results have validation accuracy.",
        cells=(cell,),
        rows=ROWS,
        panels=[
            panel(f"{group.capitalize()} clients", (cell,), {row.name: Point(row.name, cell, group) for row in ROWS})
            for group in GROUPS
        ],
        sections=_sections,
        judge=_judge,
        draw=draw_curves,
    )


def _sections(evidence: Evidence) -> list[str]:
    """Return a table: what a round sends, and what it takes to be as good as FedAvg at its best."""
    (cell,) = evidence.experiment.cells
    curves = {row.name: curve(evidence.results(row.name, cell.name)) for row in ROWS}
    usual = curves[BASELINE]
    target = None if usual is None else float(usual.accuracy["seen"].max())
    body = []
    for name, one in curves.items():
        if one is None:
            body.append([name, *[MISSING] * 5])
            continue
        results = evidence.results(name, cell.name)
        size = mean_and_std([counted_bytes(result) for result in results])[0]
        best = f"{one.accuracy['seen'].max():.1f}"
        rounds, gigabytes = (first_reached(one, by, target) for by in ("rounds", "gigabytes"))
        words = (MISSING if rounds is None else f"{rounds:,.0f}", MISSING if gigabytes is None else f"{gigabytes:,.2f}")
        body.append([name, str(len(results)), f"{size / 1e6:.2f}", best, *words])
    return [
        "## Rounds and gigabytes",
        "",
        "Bytes are counted, down and up. The last two columns say when a method first has the best validation accuracy "
        f"of {BASELINE} on seen clients.",
        "",
        *markdown_table(["", "seeds", "MB a round", "best validation accuracy, %", "rounds", "GB"], body),
    ]


def _judge(evidence: Evidence) -> list[Verdict]:
    (cell,) = evidence.experiment.cells
    curves = {row.name: curve(evidence.results(row.name, cell.name)) for row in ROWS}
    pefll = curves["PeFLL"]
    text = "During the whole training PeFLL is better than all baselines (validation accuracy)"
    verdicts = [
        ahead_verdict(text, "fig:shakespeare_rounds", f"{name}: {group}", pefll, one, "rounds", group)
        for name, one in curves.items()
        if name not in OURS
        for group in GROUPS
    ]
    text = f"For the same gigabytes PeFLL is within {SIMILAR:g} points of {BASELINE}, on average (validation accuracy)"
    for group in GROUPS:
        _, points = differences(pefll, curves[BASELINE], "gigabytes", group)
        verdicts.append(_similar(text, group, points))
    return verdicts


def _similar(text: str, group: str, points: Array) -> Verdict:
    """Return the verdict on a statement that two curves are similar; `points` [b] are their differences."""
    place, where = "fig:shakespeare_communication_cost", f"{BASELINE}: {group}"
    if not len(points):
        return Verdict(text, place, where, "", "", NOTHING)
    span = f"{signed(points.min())} to {signed(points.max())} (budgets)"
    word = HOLDS if np.abs(points).mean() <= SIMILAR else FAILS
    return Verdict(text, place, where, f"{np.abs(points).mean():.1f} apart", span, word)


EXPERIMENT = experiment(CELL)
