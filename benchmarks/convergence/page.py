"""The page and the figure of the measurement of Theorem 3.1, from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pefll.experiments.pages import markdown_table
from pefll.report.plots import LINES, drawing

EXPECTED = {
    "rounds": "-1/2",
    "clients": "-1/2",
    "steps": "0 to -1",
    "steps, part of the noise": "-1",
    "batch, excess over all samples": "-1",
    "batch, floor of infinitely many rounds": "-1",
}
EXCESS, FLOOR = "excess over all samples", "floor for T → ∞"
TERMS = ("start", "noise", "drift", "jacobian", "model")
TITLES = {
    "rounds": "T, rounds",
    "clients": "c, clients per round",
    "steps": "k, local steps",
    "batch": "b, samples of a descriptor",
}


def markdown(record: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    known = record["constants"]
    lines = [
        "# Theorem 3.1, measured",
        "",
        f"`{record['command']}`. Each figure is the mean over rounds and repetitions of ‖∇F(η_t)‖², with a 95% "
        f"interval. In all runs the largest singular value of both networks was at most {record['reach']:.2f}; the "
        f"constants hold up to {record['ball']}.",
        "",
        "## Constants",
        "",
        *markdown_table(["constant", "value"], [[name, f"{value:.4g}"] for name, value in known.items()]),
        "",
        "## Slopes on logarithmic axes",
        "",
        *markdown_table(["", "at", "measured", "theorem's rate", "slope of the whole bound"], _slopes(record)),
        "",
    ]
    for sweep, title in TITLES.items():
        lines += [f"## {title}", "", *markdown_table(_headings(sweep), _rows(record, sweep)), ""]
    lines += [
        "## Where training with descriptors from batches ends",
        "",
        "‖∇F‖² at the least expected objective over batches: what infinitely many small steps leave.",
        "",
        *markdown_table(["b", "‖∇F‖²"], [[batch, f"{value:.3g}"] for batch, value in record["floors"].items()]),
    ]
    return lines


def _slopes(record: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, found in record["slopes"].items():
        exact = found["low"] == found["high"]
        measured = f"{found['value']:.2f}" + ("" if exact else f" [{found['low']:.2f}, {found['high']:.2f}]")
        whole = "" if found["bound"] is None else f"{found['bound']:.2f}"
        rows.append([name, ", ".join(f"{at:,.0f}" for at in found["at"]), measured, EXPECTED[name], whole])
    return rows


def _headings(sweep: str) -> list[str]:
    first = [TITLES[sweep]] + (["noise"] if sweep == "steps" else [])
    return [*first, "measured", "bound", *TERMS, "bound / measured", "sharper", "printed"]


def _rows(record: dict[str, Any], sweep: str) -> list[list[str]]:
    found = []
    for row in (row for row in record["rows"] if row["sweep"] == sweep):
        mean, bound, sharper = row["mean"], row["bound"], row["sharper"]
        line = [f"{row[sweep]:,}" if row[sweep] else "all"]
        if sweep == "steps":
            line.append(f"σ_1 = {record['constants']['sigma1']:g}" if row["noisy"] else "none")
        line.append(f"{mean['value']:.3g} [{mean['low']:.3g}, {mean['high']:.3g}]")
        if bound:
            total = sum(bound.values())
            line += [f"{total:.3g}", *(f"{bound[term]:.3g}" for term in TERMS), f"{total / mean['value']:.0f}"]
            line.append(f"{sum(sharper.values()):.3g}")
        else:  # too few rounds
            line += [""] * (len(TERMS) + 3)
        found.append([*line, f"{sum(row['printed'].values()):.3g}"])
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the measured means beside the bounds against T, c, k and b."""
    with drawing(path, (10, 7)) as figure:
        for axes, (sweep, title) in zip(figure.subplots(2, 2).flat, TITLES.items(), strict=True):
            rows = [row for row in record["rows"] if row["sweep"] == sweep and row["noisy"] and row[sweep]]
            x = [row[sweep] for row in rows]
            mean = [row["mean"]["value"] for row in rows]
            error = [[row["mean"]["value"] - row["mean"]["low"] for row in rows]] * 2
            axes.errorbar(x, mean, error, fmt="o-", color=LINES[0], ms=4, lw=1.2, label="measured")
            bounded = [row for row in rows if row["bound"]]
            totals = [sum(row["bound"].values()) for row in bounded]
            axes.plot([row[sweep] for row in bounded], totals, "s-", color=LINES[1], ms=3, lw=1.2, label="bound")
            sharper = [sum(row["sharper"].values()) for row in bounded]
            axes.plot([row[sweep] for row in bounded], sharper, "-", color=LINES[4], lw=1.2, label="sharper bound")
            printed = [sum(row["printed"].values()) for row in rows]
            axes.plot(x, printed, ":", color=LINES[1], lw=1.2, label="bound as printed")
            first = mean[0]
            if sweep in ("rounds", "clients"):
                guide = [first * (value / x[0]) ** -0.5 for value in x]
                axes.plot(x, guide, "--", color=LINES[7], lw=0.9, label="slope -1/2")
            if sweep == "batch":
                _draw_floor(record, axes)
            axes.set(xscale="log", yscale="log", xlabel=title, title=f"mean ‖∇F‖² against {title.split(',')[0]}")
            axes.grid(axis="y")
            handles, labels = axes.get_legend_handles_labels()
            # The last panel has no place for names that are in the others.
            own = [at for at, label in enumerate(labels) if sweep != "batch" or label in (EXCESS, FLOOR)]
            place = "lower left" if sweep == "batch" else "best"
            axes.legend([handles[at] for at in own], [labels[at] for at in own], fontsize=8, loc=place)


def _draw_floor(record: dict[str, Any], axes: Any) -> None:
    """Draw the excess over training with all samples, and the floor that is left after infinitely many rounds."""
    rows = [row for row in record["rows"] if row["sweep"] == "batch"]
    whole = next(row["mean"]["value"] for row in rows if not row["batch"])
    clear = record["slopes"].get("batch, excess over all samples", {"at": []})["at"]
    some = [row for row in rows if row["batch"] in clear]
    axes.plot(
        [row["batch"] for row in some],
        [row["mean"]["value"] - whole for row in some],
        "^-",
        color=LINES[2],
        ms=4,
        lw=1.2,
        label=EXCESS,
    )
    floors = {int(batch): value for batch, value in record["floors"].items()}
    axes.plot([*floors], [*floors.values()], "v-", color=LINES[3], ms=4, lw=1.2, label=FLOOR)
