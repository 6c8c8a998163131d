"""The page, the model card and the figures of a certificate, from its JSON alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.report.markup import code, markdown
from pefll.report.plots import FAINT, INK, LINES, UNSEEN, drawing
from pefll.runs.record import figure_text, figures_in, metric_word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = Mapping[str, Any]

WIDTH = 80  # of the page, in characters
_HELD_OUT = ("mean-", "share-")  # names of statements whose assumptions are those of the whole certificate
_BINS = 20
NO_BREAK = "\u00a0"
_LABEL = 44  # most characters of a line beside the figure
_COLUMNS = 3  # of panels


def print_certificate(certificate: Json, console: Console, title: str = "") -> None:
    """Print the page: statements, what they assume, and least numbers.

    Args:
        certificate: as in the summary of a run.
        console: where to print.
        title: the run or file.
    """
    width = min(console.width, WIDTH)
    _print_line(f"Certificate{f' of {title}' if title else ''}: {_about(certificate)}", console, width)
    table = Table("statement", "bound", "measured", "in plain words", width=width, show_lines=True)
    table.columns[0].width, table.columns[3].ratio = 20, 1
    for column in table.columns[1:3]:
        column.justify, column.no_wrap = "right", True
    for row in certificate["statements"]:
        bound = bound_text(row) + ("\nvacuous" if row["vacuous"] else "")
        words = (row["title"], bound, share_text(row["measured"]), row["promise"])
        table.add_row(*map(escape, words), style="dim" if row["vacuous"] else None)
    console.print(table)
    for heading, lines in (("Assumes", _assumptions(certificate)), ("Notes", certificate["notes"])):
        if lines:
            _print_line(heading, console, width)
        for line in lines:
            _print_line(f"- {line}", console, width)
    if certificate["plan"]:
        _print_line("Least numbers", console, width)
    for row in certificate["plan"]:
        _print_line(f"- {row['what']}: {row['least']:,}", console, width)


def model_card(summary: Json, certificate: Json) -> str:
    """Return a short Markdown model card: what was trained on what, test figures, guarantees, assumptions.

    PefllError if the summary, which may come from a stranger, makes no sense.
    """
    try:
        about = _about_training(summary, certificate["run"])
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PefllError(
            f"the model card cannot be written: the run's summary is damaged ({error!r}); train the run again",
            code="PEFLL-G149",
        ) from error
    lines = [*about, "", "## Guarantees for new clients", "", certificate_markdown(certificate), "## Assumptions", ""]
    lines += [f"- {markdown(line)}" for line in _assumptions(certificate)]
    lines += ["", "## Notes", "", *(f"- {markdown(line)}" for line in certificate["notes"]), ""]
    return "\n".join(lines)


def _about_training(summary: Json, run: Json) -> list[str]:
    """Return the lines of a model card about a run; names in them have no effect as Markdown."""

    def text(values: Json, name: str, otherwise: str) -> str:
        value = values.get(name)
        return otherwise if value in (None, "") else markdown(str(value))

    lines = [
        f"# {text(run, 'method', 'A model')} on {text(run, 'dataset', 'clients of a federation')}",
        "",
        "A personal model for each client, also for clients that training never saw.",
        "",
        f"- Method: {text(run, 'method', 'unknown')}, seed {text(run, 'seed', 'unknown')}, "
        f"model {text(summary, 'model', 'its own')}",
        f"- Data: {text(run, 'dataset', 'unknown')}, partition {text(run, 'partition', 'of its own')}, "
        f"{counted(int(run.get('num_seen', 0)), 'seen client')}, "
        f"{counted(int(run.get('num_unseen', 0)), 'unseen client')}",
        f"- Training: {text(summary, 'rounds', '?')} rounds, best round {text(run, 'best_round', '?')}",
    ]
    if summary.get("command"):
        lines.append(f"- Command: {code(str(summary['command']))}")
    shares = given if isinstance(given := summary.get("shares"), list) else ()
    if best := figures_in(summary).get("best"):
        lines += ["", "## Test figures at the best round", ""]
        for group, figures in best.items():
            if figures:
                texts = (f"{metric_word(name)} {figure_text(figures, name, shares)}" for name in list(figures)[:4])
                lines.append(f"- {markdown(group)} clients: {markdown(', '.join(texts))}")
    return lines


def certificate_markdown(certificate: Json) -> str:
    """Return the statements as a Markdown table."""
    lines = ["| statement | bound | measured | confidence | promise |", "| --- | ---: | ---: | ---: | --- |"]
    for row in certificate["statements"]:
        measured, confidence = share_text(row["measured"]), f"{round(100 * row['confidence'], 6):g}%"
        cells = (row["title"], _marked(row), measured, confidence, row["promise"])
        lines.append(f"| {' | '.join(markdown(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def certificate_picture(certificate: Json, values: Sequence[float], out: Path) -> None:
    """Draw the bounds beside the measured mean and the distribution of unseen clients.

    An upper bound on the error is drawn as a lower bound on the accuracy, which is 100% minus the error.

    Args:
        certificate: as in the summary of a run.
        values: the metric of each unseen client, between 0 and 1; none without unseen clients.
        out: the file, .png, .pdf or .svg.
    """
    metric = certificate["metric"]
    rows = [row for row in certificate["statements"] if _is_drawn(row, metric)]
    labels = [fill(f"{row['title']} {_marked(row).replace(' ', NO_BREAK)}", _LABEL) for row in rows]
    bars = sum(0.34 + 0.15 * label.count("\n") for label in labels)
    heights = (1.5, 0.5 + bars) if len(values) else (0.5 + bars,)
    with drawing(out, (8.4, (2.2 if len(values) else 1.0) + bars)) as figure:
        panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        below = panels[-1]
        if len(values):
            top = panels[0]
            top.hist(100 * np.asarray(values), bins=np.linspace(0, 100, _BINS + 1).tolist(), color=UNSEEN, alpha=0.55)
            top.axvline(100 * float(np.mean(values)), color=INK, linewidth=1.4)
            top.set_ylabel("unseen clients")
            top.set_title(f"{metric.capitalize()} of {counted(len(values), 'unseen client')}, and what it promises")
        else:
            below.set_title("What training promises about new clients")
        _draw_bounds(below, rows, labels)
        confidence = f"{round(100 * (1 - certificate['delta']), 6):g}%"
        errors = (
            "\n≤: a bound on the error, drawn as 100% minus the error" if any(not row["lower"] for row in rows) else ""
        )
        below.set_xlabel(f"{metric}, % (dot: measured; bar: lower bound with confidence {confidence}){errors}")
        below.set_xlim(0, 100)


def _is_drawn(row: Json, metric: str) -> bool:
    """Return whether a statement is about the metric, or about the share of wrong predictions beside an accuracy."""
    is_error = metric == "accuracy" and not row["name"].endswith("cross-entropy")
    return row["bound"] is not None and (row["lower"] or is_error)


def bounds_over_training(
    panels: Mapping[str, Sequence[Json]],
    out: Path,
    labels: Mapping[str, str] | None = None,
    error: str = "unseen error",
) -> None:
    """Draw bounds against the true error of unseen clients over the rounds of training, with a panel for each run.

    Bounds of 1 or more say nothing; a dashed line marks 1.

    Args:
        panels: the rounds of each run by its heading, `{"round": int, "unseen_error": float, "bounds": {name: float}}`.
        out: the file, .png, .pdf or .svg.
        labels: the bounds to draw by name, with their labels; None for all of them, under their names.
        error: the label of the true error.
    """
    from matplotlib.ticker import StrMethodFormatter

    if not any(panels.values()):
        raise PefllError("there is no round with bounds to draw; evaluate the bounds at some rounds", code="PEFLL-G140")
    found = (name for rows in panels.values() for row in rows for name in row["bounds"])
    shown = dict.fromkeys(found) if labels is None else labels
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    known: list[float] = []
    with drawing(out, (max(7.6, 4.6 * columns), 0.6 + 3.6 * lines)) as figure:
        every = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
        for axes, (title, rows) in zip(every, panels.items(), strict=False):
            known += _draw_rounds(axes, sorted(rows, key=lambda row: int(row["round"])), shown, error)
            axes.set_title(title)
            axes.set_xlabel("round")
        for axes in every[len(panels) :]:
            axes.set_axis_off()
        every[0].set_ylabel("error")
        if max(known, default=1.0) > 1:
            every[0].set_yscale("log")
            every[0].yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))  # the default writes formulas
            for axes in every[: len(panels)]:
                axes.axhline(1, color=FAINT, linestyle="--", linewidth=1)
        else:
            every[0].set_ylim(0, 1.02)
        handles = {line.get_label(): line for axes in every for line in axes.get_lines()}
        legend = {name: line for name, line in handles.items() if not str(name).startswith("_")}
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=min(3, len(legend)))


def _draw_rounds(axes: Axes, rows: Sequence[Json], shown: Mapping[str, str | None], error: str) -> list[float]:
    """Draw the true error and the bounds of one run; return all finite heights."""
    rounds = [row["round"] for row in rows]
    axes.grid(axis="y")
    axes.plot(rounds, [_nan(row["unseen_error"]) for row in rows], color=INK, linewidth=2, label=error)
    for place, (name, label) in enumerate(shown.items()):
        heights = [_nan(row["bounds"].get(name)) for row in rows]
        if any(map(math.isfinite, heights)):
            colour = LINES[place % len(LINES)]
            axes.plot(rounds, heights, color=colour, marker="o", markersize=3, label=label or name)
    heights = [height for line in axes.get_lines() for height in np.asarray(line.get_ydata(), float)]
    return [height for height in heights if math.isfinite(height)]


def bound_text(row: Json) -> str:
    """Return a statement's bound, such as `"≥ 84.1%"`, rounded to the safe side."""
    bound, lower = row["bound"], row["lower"]
    if bound is None:
        return "—"
    if not 0 <= bound <= 1:
        return f"{'≥' if lower else '≤'} {bound:.3g}"
    rounded = math.floor(1000 * bound + 1e-9) if lower else math.ceil(1000 * bound - 1e-9)
    return f"{'≥' if lower else '≤'} {rounded / 10:.1f}%"


def share_text(value: float | None) -> str:
    """Return a share in per cent, and another number with three digits."""
    if value is None:
        return "—"
    return f"{100 * value:.1f}%" if 0 <= value <= 1 else f"{value:.3g}"


def _draw_bounds(axes: Axes, rows: Sequence[Json], labels: Sequence[str]) -> None:
    heights = np.arange(len(rows))[::-1]
    axes.grid(axis="x")
    for height, row, colour in zip(heights, rows, (UNSEEN, *[FAINT] * len(rows)), strict=False):
        bound, measured = row["bound"], row["measured"]
        if not row["lower"]:
            bound, measured = 1 - bound, None if measured is None else 1 - measured
        axes.barh(height, 100 * max(0.0, bound), height=0.55, color=colour, alpha=0.85)
        if measured is not None:
            axes.plot(100 * measured, height, "o", color=INK, markersize=4.5)
    axes.set_yticks(heights, labels=labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _marked(row: Json) -> str:
    """Return a statement's bound, with a mark if it says nothing."""
    return bound_text(row) + (" (vacuous)" if row["vacuous"] else "")


def _about(certificate: Json) -> str:
    run = certificate["run"]
    where = f"{run.get('method', 'a method')} on {run.get('dataset', 'other data')}"
    partition = f" ({run['partition']})" if run.get("partition") else ""
    seed = f", seed {run['seed']}" if "seed" in run else ""
    return f"{where}{partition}{seed}; {counted(certificate['clients'], 'unseen client')}."


def _assumptions(certificate: Json) -> list[str]:
    """Return the assumptions of the certificate, and those of single statements from training."""
    own: dict[str, list[str]] = {}
    for row in certificate["statements"]:
        if not row["name"].startswith(_HELD_OUT):
            own.setdefault(row["assumes"], []).append(row["title"])
    return [*certificate["assumptions"], *(f"{', '.join(titles)}: {text}" for text, titles in own.items())]


def _print_line(text: str, console: Console, width: int) -> None:
    """Print a paragraph, wrapped at the page's width, with further lines of a list indented."""
    indent = "  " if text.startswith("- ") else ""
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            console.print(line, markup=False, highlight=False)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    console.print(line, markup=False, highlight=False)


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
