"""How often each certificate failed, from the rows of worlds, and the page and the figure of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.experiments.pages import markdown_table
from pefll.guarantees.binomial import clopper_pearson_upper
from pefll.report.plots import LINES, drawing

CLEAR = 2.0  # a failure is clear if it exceeds this many standard errors of the truth


class Count(NamedTuple):
    """How one certificate did in all worlds.

    Attributes:
        name: of the certificate.
        worlds: number of worlds that have it.
        violated: worlds in which the estimated truth is on the wrong side of the bound.
        clear: such worlds in which the truth's own error does not explain it.
        upper: Clopper-Pearson limit above the rate of violations, with confidence 95%.
        median: median of the distance from truth to bound; positive where the bound holds.
        mean: mean of these distances.
        vacuous: share of worlds in which the bound says nothing.
        error: mean standard error of the truth.
        valid: whether the violations do not contradict a rate of at most δ, at the level of 1%.
    """

    name: str
    worlds: int
    violated: int
    clear: int
    upper: float
    median: float
    mean: float
    vacuous: float
    error: float
    valid: bool


def row_of(judged: Any) -> dict[str, Any]:
    """Return a judged certificate as JSON."""
    statement, truth = judged
    return {
        "bound": statement.bound,
        "lower": statement.lower,
        "measured": None if np.isnan(statement.measured) else statement.measured,
        "vacuous": statement.vacuous,
        "truth": truth.value,
        "error": truth.error,
    }


def gap_of(row: dict[str, Any]) -> float:
    """Return how far the truth is on the right side of a bound; negative if the bound is violated."""
    gap: float = row["truth"] - row["bound"] if row["lower"] else row["bound"] - row["truth"]
    return gap


def counts(rows: Sequence[dict[str, Any]], delta: float) -> list[Count]:
    """Return the counts of each certificate, in the order of the first row that has it."""
    every = [row["certificates"] for row in rows]
    names = dict.fromkeys(name for one in every for name in one)
    return [_count(name, [one[name] for one in every if name in one], delta) for name in names]


def _count(name: str, rows: Sequence[dict[str, Any]], delta: float) -> Count:
    gaps, errors = np.array([gap_of(row) for row in rows]), np.array([row["error"] for row in rows])
    violated = int((gaps < 0).sum())
    # If the rate were δ, so many violations would be seen with probability below 1%.
    least = 1 - float(clopper_pearson_upper(len(rows) - violated, len(rows), 0.01)) if violated else 0.0
    return Count(
        name=name,
        worlds=len(rows),
        violated=violated,
        clear=int((gaps < -CLEAR * errors).sum()),
        upper=float(clopper_pearson_upper(violated, len(rows), 0.05)),
        median=float(np.median(gaps)),
        mean=float(gaps.mean()),
        vacuous=float(np.mean([row["vacuous"] for row in rows])),
        error=float(errors.mean()),
        valid=least <= delta,
    )


def markdown(record: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    delta = record["delta"]
    headings = ["certificate", "worlds", "violated", "rate", "at most (95%)", "clearly", "median gap", "mean gap"]
    body = [
        [
            *(row["name"], f"{row['worlds']:,}", f"{row['violated']:,}", f"{row['violated'] / row['worlds']:.3f}"),
            *(f"{row['upper']:.3f}", f"{row['clear']:,}", f"{row['median']:.3f}", f"{row['mean']:.3f}"),
            *(f"{row['vacuous']:.2f}", f"{row['error']:.4f}", "yes" if row["valid"] else "**no**"),
        ]
        for row in record["certificates"]
    ]
    return [
        "# How often certificates fail",
        "",
        f"`{record['command']}`. Each world has its own clients and its own run. A certificate may fail in a share of "
        f"δ = {delta:g} of the worlds. The gap is the distance from truth to bound, negative if the "
        "certificate fails. The truth is estimated from thousands of new clients. A failure is clear if it exceeds "
        f"{CLEAR:g} standard errors of this estimate.",
        "",
        *markdown_table([*headings, "vacuous", "error of truth", f"rate ≤ {delta:g}"], body),
    ]


def draw(rows: Sequence[dict[str, Any]], found: Sequence[Count], delta: float, path: Path) -> None:
    """Draw the gaps of each certificate, sorted over worlds: the share left of zero must be at most δ."""
    columns = 3
    lines = -(-len(found) // columns)
    with drawing(path, (10.5, 2.5 * lines + 0.4)) as figure:
        panels = figure.subplots(lines, columns, squeeze=False)
        for axes, one in zip(panels.flat, found, strict=False):
            gaps = np.sort([gap_of(row["certificates"][one.name]) for row in rows if one.name in row["certificates"]])
            share = np.arange(1, len(gaps) + 1) / len(gaps)
            axes.plot(gaps, share, ".", color=LINES[0], ms=3)
            axes.plot(gaps[gaps < 0], share[gaps < 0], ".", color=LINES[1], ms=4)
            axes.axvline(0, color=LINES[7], lw=0.8)
            axes.axhline(delta, color=LINES[7], lw=0.8, ls=":")
            axes.set(title=f"{one.name}: {one.violated} of {one.worlds}", ylim=(-0.03, 1.03))
        for axes in panels.flat[len(found) :]:
            axes.set_visible(False)
        for axes in panels[:, 0]:
            axes.set_ylabel("share of worlds")
        figure.supxlabel("gap from truth to bound; left of 0 the certificate fails, dotted: δ", fontsize=9)
