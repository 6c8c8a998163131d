"""Draws a record: the speed of each contender, and how it grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.speed.table import AXES, describe, known, number
from pefll.core.errors import PefllError
from pefll.report.plots import LINES, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PLAIN, PEER = LINES[0], "#8a8a8a", LINES[1]


def draw(races: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw bars for the main races and for other models, and a line per contender for each type of growth.

    Args:
        races: races of a record.
        out: path of the picture.
    """
    main = [entry for group in ("main", "models") for entry in races if entry["group"] == group]
    grown = {group: entries for group in AXES if len(entries := [e for e in races if e["group"] == group]) > 1}
    if not main and not grown:
        raise PefllError("there is nothing to draw: no race among everybody, and no growth")
    columns = max(2, len(grown))
    heights = [0.3 * len(entry["rows"]) + 1.2 for entry in main] + [3.0] * bool(grown)
    with drawing(out, (3.4 * columns, sum(heights) + 0.4)) as figure:
        bands = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for entry, band in zip(main, bands, strict=False):
            rates = {"steps_per_second": "Client steps per second", "steps_per_cpu_second": "Per CPU-second"}
            if not all(known(row, rate) for rate in rates for row in entry["rows"] if "error" not in row):
                del rates["steps_per_cpu_second"]  # the GPU does the work, and CPU time is too short to measure
            panels = band.subplots(1, len(rates), sharey=True, squeeze=False)[0]
            band.suptitle(describe(entry["setting"]), fontsize=9, x=0.01, ha="left")
            for axes, (rate, title) in zip(panels, rates.items(), strict=True):
                _bars(axes, entry, rate, title)
        if grown:
            panels = bands[-1].subplots(1, len(grown), squeeze=False)[0]
            for axes, (group, entries) in zip(panels, grown.items(), strict=True):
                _lines(axes, group, entries)


def _bars(axes: Axes, entry: dict[str, Any], name: str, title: str) -> None:
    rows = [row for row in entry["rows"] if "error" not in row][::-1]
    for place, row in enumerate(rows):
        ours, plain = row["label"].startswith("ours"), row["contender"].startswith("plain")
        rate = row[name]
        axes.barh(place, rate["median"], color=OURS if ours else PLAIN if plain else PEER, height=0.62)
        axes.plot([rate["least"], rate["most"]], [place, place], color="#333333", linewidth=1)
        axes.annotate(f" {number(rate['median'])}", (rate["most"], place), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.locator_params(axis="x", nbins=5)  # more labels would overlap if numbers are large
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(title)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.grid(axis="x")


def _lines(axes: Axes, group: str, entries: Sequence[dict[str, Any]]) -> None:
    rows = [(entry["setting"][group], row) for entry in entries for row in entry["rows"] if "error" not in row]
    # Each point is a separate race, so only ratios can be compared, if the plain loop took part in all races.
    relative = all("plain" in row["over"] for _, row in rows)
    points: dict[str, dict[int, float]] = {}
    for value, row in rows:
        rate = row["over"]["plain"]["steps_per_second"] if relative else row["steps_per_second"]
        points.setdefault(row["label"], {})[value] = rate["median"]
    for place, (label, values) in enumerate(points.items()):
        along = sorted(values)
        colour = LINES[place % len(LINES)]
        axes.plot(along, [values[value] for value in along], label=label, color=colour, marker="o", markersize=3)
    axes.set_xscale("log")
    measured = sorted({value for values in points.values() for value in values})
    axes.set_xticks(measured, [f"{value:,}" for value in measured])
    axes.set_xticks([], minor=True)
    if relative:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_xlabel(AXES[group])
    axes.set_title("Times the plain loop" if relative else "Client steps per second")
    axes.grid(axis="y")
    axes.legend(fontsize=7)
