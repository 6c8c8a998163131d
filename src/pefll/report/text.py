"""Learning curves as text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from pefll.report.groups import labels_of, note_of_undefined_curves, note_of_unseen
from pefll.report.runs import Array, StoredRun, in_per_cent
from pefll.report.table import metric_text, metric_words
from pefll.runs.record import GROUPS

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"seen": "cyan", "unseen": "yellow"}
# Braille: the bit of each of the 4 x 2 dots in a cell, from the top left.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


def sparkline(values: Array, width: int, low: float | None = None, high: float | None = None) -> str:
    """Return a curve of values [n], one character high and at most `width` long; NaN is a missing value.

    A longer curve is averaged over equal intervals. The lowest block stands for `low`, by default the smallest value.
    The highest block stands for `high`, by default the largest value.
    """
    values = np.asarray(values, dtype=np.float64)
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return ""
    low = float(known.min()) if low is None else low
    high = float(known.max()) if high is None else high
    means = [_mean(part) for part in np.array_split(values, min(width, len(values)))]
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if np.isnan(value) else _BLOCKS[int(np.clip(round((value - low) * scale), 0, 7))] for value in means
    )


def braille_plot(series: dict[str, tuple[Array, Array]], width: int, height: int, per_cent: bool = True) -> Text:
    """Return curves with axes, drawn with braille dots: 2 x 4 per character.

    A character in which curves cross has the colour of the later curve.

    Args:
        series: x and y of each curve, [n] each; the names `"seen"` and `"unseen"` have colours.
        width: number of characters, without the labels of the y axis.
        height: number of lines, without the x axis.
        per_cent: whether y is in 0..1 and labelled in per cent.
    """
    points = {name: (x[~np.isnan(y)], y[~np.isnan(y)]) for name, (x, y) in series.items()}
    points = {name: (x, y) for name, (x, y) in points.items() if len(x)}
    if not points:
        return Text("")
    xs, ys = (np.concatenate([pair[axis] for pair in points.values()]) for axis in (0, 1))
    cells = np.zeros((height, width), dtype=np.int64)
    owner = np.full((height, width), "", dtype=object)
    for name, (x, y) in points.items():
        columns = np.linspace(x.min(), x.max(), 8 * width)
        right = _place(columns, xs.min(), xs.max(), 2 * width)
        down = 4 * height - 1 - _place(np.interp(columns, x, y), ys.min(), ys.max(), 4 * height)
        np.bitwise_or.at(cells, (down // 4, right // 2), _DOTS[down % 4, right % 2])
        owner[down // 4, right // 2] = name
    text = Text()
    for line in range(height):
        share = 1 - line / max(1, height - 1)
        value = ys.min() + share * (ys.max() - ys.min())
        label = f"{100 * value:5.1f}" if per_cent else f"{value:5.4g}"
        text.append(f"{label[:5]:>5} ┤" if line in (0, height // 2, height - 1) else "      │", style="dim")
        for bits, name in zip(cells[line], owner[line], strict=True):
            text.append(chr(0x2800 + int(bits)) if bits else " ", style=_COLOURS.get(name, ""))
        text.append("\n")
    first, last = f"{xs.min():.0f}", f"round {xs.max():.0f}"
    text.append("      └" + "─" * width + "\n", style="dim")
    text.append("       " + first + last.rjust(max(width - len(first), len(last) + 1)), style="dim")
    return text


def run_plot(run: StoredRun, width: int = 64, height: int = 9) -> Text:
    """Return a plot of a run's validation accuracy on seen and unseen clients; empty without evaluations."""
    curves = _validation_curves(run)
    if not curves:
        return Text(note_of_undefined_curves([run]), style="dim")
    share = in_per_cent([run])
    title = Text(f"Validation {metric_words([run])}: ", style="italic")
    for group, values in curves.items():
        title.append(f"{group} {metric_text(float(values[~np.isnan(values)][-1]), share)}  ", style=_COLOURS[group])
    plot = braille_plot({group: (run.rounds, values) for group, values in curves.items()}, width, height, share)
    note = note_of_unseen([run])
    return Text("\n").join([title, plot, *([Text(note, style="dim")] if note else [])])


def sparklines(runs: Sequence[StoredRun], width: int = 32) -> Lines:
    """Return the validation accuracy over rounds, one line per run and group of clients, all on one scale.

    All runs must have the same metric.
    """
    known = np.concatenate([np.empty(0), *(run.validation(group, run.metric) for run in runs for group in GROUPS)])
    share = in_per_cent(runs) if runs else True
    known = known[~np.isnan(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for run, label in zip(runs, labels_of(runs), strict=True):
        for line, (group, values) in enumerate(_validation_curves(run).items()):
            curve = Text(sparkline(values, width, low, high), style=_COLOURS[group])
            latest = values[~np.isnan(values)][-1]
            table.add_row(Text("" if line else label), group, curve, metric_text(float(latest), share))
    what = metric_words(runs)
    ends = f"from {metric_text(low, share)} (▁) to {metric_text(high, share)} (█)"
    title = Text(f"Validation {what}, {ends}", style="italic")
    notes = filter(None, (note_of_unseen(runs), note_of_undefined_curves(runs)))
    return Lines(title, table, *(Text(note, style="dim") for note in notes))


def _validation_curves(run: StoredRun) -> dict[str, Array]:
    curves = {group: run.validation(group, run.metric) for group in GROUPS}
    return {group: values for group, values in curves.items() if not np.isnan(values).all()}


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _place(values: Array, low: float, high: float, steps: int) -> Array:
    """Return the dot of each value, 0..steps-1; the middle dot if all values are equal."""
    if high <= low:
        return np.full(len(values), steps // 2, dtype=np.int64)
    return np.clip(np.round((values - low) / (high - low) * (steps - 1)), 0, steps - 1).astype(np.int64)
