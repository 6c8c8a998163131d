"""Pictures of a federation: what labels its clients have, and how many samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN
from pefll.data.summary import label_names
from pefll.report.descriptors import Array
from pefll.report.plots import INK, SEEN, SKEW, UNSEEN, add_colour_bar, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SHOWN = 60  # clients
MOST_NAMED = 26  # classes or labels with a bubble for each client; more of them are drawn as cells
MOST_COLUMNS = 4  # panels for the columns of numbers
_SPREAD = (5, 25, 50, 75, 95)  # per cent of a client's labels that are below the ends of its line, its bar and its dot


def federation_picture(federation: Federation, out: Path) -> None:
    """Draw the training labels of each client, and the distribution of the clients' sample counts.

    Classes are drawn as each client's shares, sets as the share of a client's samples that have each label, and numbers
    as each client's spread.
    """
    title, names, sizes = federation.name, label_names(federation), federation.count[TRAIN].cpu().numpy()
    if federation.labels == "classes":
        class_picture(federation.histograms(), federation.num_seen, out, names, title)
    elif federation.labels == "sets":
        set_picture(federation.histograms(), sizes, federation.num_seen, out, names, title)
    else:
        rows = federation.rows_of_clients(TRAIN)
        numbers = federation.y.cpu().numpy()[rows].reshape(len(rows), -1)
        number_picture(numbers, sizes, federation.num_seen, out, names, title)


def class_picture(
    histograms: Array, num_seen: int, out: Path, class_names: Sequence[str] = (), title: str = ""
) -> None:
    """Draw the classes of each client, and the distribution of the clients' sample counts.

    Args:
        histograms: [n, classes], samples per client and class; seen clients first.
        num_seen: how many clients are seen.
        out: the file to write.
        class_names: one per class; empty for numbers.
        title: title above the picture.
    """
    histograms = np.asarray(histograms)
    if histograms.ndim != 2 or histograms.size == 0:
        raise PefllError(
            f"histograms has shape {histograms.shape}; it must have one row per client and one column per class",
            code="PEFLL-O007",
        )
    n, classes = histograms.shape
    shown = _sample_clients(n, num_seen)
    with drawing(out, _size(classes)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1))
        left.set_title(f"Classes of {_whom(n, shown, title)}", pad=22)
        if classes <= MOST_NAMED:
            # Shares, because counts would make the bubbles of small clients invisible. The other panel shows counts.
            shares = histograms[shown] / np.maximum(1, histograms[shown].sum(axis=1, keepdims=True))
            _draw_bubbles(figure, left, shares, shown < num_seen)
            left.set_xlabel("client (area: a class's share of the client's samples)")
        else:
            _draw_cells(figure, left, histograms[shown], "samples (log scale)", log=True)
        _name_rows(left, "class", _names(class_names, classes))
        _divide(left, int((shown < num_seen).sum()), len(shown))
        _draw_sizes(right, histograms.sum(axis=1), num_seen)


def set_picture(
    histograms: Array, sizes: Array, num_seen: int, out: Path, names: Sequence[str] = (), title: str = ""
) -> None:
    """Draw the share of each client's samples that have each label, and the distribution of the sample counts.

    Args:
        histograms: [n, k], number of a client's samples with each label; seen clients first.
        sizes: [n], number of a client's samples.
        num_seen: how many clients are seen.
        out: the file to write.
        names: one per label; empty for numbers.
        title: title above the picture.
    """
    n, labels = histograms.shape
    shown = _sample_clients(n, num_seen)
    shares = histograms[shown] / np.maximum(1, sizes[shown, None])
    overall = histograms.sum(axis=0) / max(1, int(sizes.sum()))
    rows = [f"{name} ({100 * share:.0f}%)" for name, share in zip(_names(names, labels), overall, strict=True)]
    with drawing(out, _size(labels)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1))
        left.set_title(f"Share of samples with each label, of {_whom(n, shown, title)}", pad=22)
        if labels <= MOST_NAMED:
            _draw_bubbles(figure, left, shares, shown < num_seen)
            left.set_xlabel(f"client (area: share of the client's samples, at most {100 * shares.max():.0f}%)")
        else:
            _draw_cells(figure, left, 100 * shares, "share of the client's samples, %")
        _name_rows(left, "label (share of all samples)", rows)
        _divide(left, int((shown < num_seen).sum()), len(shown))
        _draw_sizes(right, sizes, num_seen)


def number_picture(
    numbers: Array, sizes: Array, num_seen: int, out: Path, names: Sequence[str] = (), title: str = ""
) -> None:
    """Draw the spread of each client's labels, a panel per column, and the distribution of the sample counts.

    Args:
        numbers: [m, k], labels of all clients, client by client; seen clients first.
        sizes: [n], number of a client's samples; they add up to m.
        num_seen: how many clients are seen.
        out: the file to write.
        names: one per column; empty for numbers.
        title: title above the picture.
    """
    n, columns = len(sizes), numbers.shape[1]
    parts = np.split(numbers.astype(np.float64), np.cumsum(sizes)[:-1])
    chosen = _sample_clients(n, num_seen)
    spreads = np.array([np.percentile(parts[client], _SPREAD, axis=0) for client in chosen])  # [shown, 5, k]
    order = np.lexsort((spreads[:, 2, 0], chosen >= num_seen))  # by the median, the seen clients first
    chosen, spreads = chosen[order], spreads[order]
    drawn = min(columns, MOST_COLUMNS)
    first = f", the first {drawn} of {columns} columns" if drawn < columns else ""
    with drawing(out, (10.5, 1.2 + 2.6 * drawn)) as figure:
        grid = figure.add_gridspec(drawn, 2, width_ratios=(3, 1))
        for column in range(drawn):
            axes = figure.add_subplot(grid[column, 0])
            if column == 0:
                axes.set_title(f"Labels of {_whom(n, chosen, title)}{first}", pad=22)
            _draw_spreads(axes, spreads[:, :, column], chosen < num_seen)
            _divide(axes, int((chosen < num_seen).sum()), len(chosen), names=column == 0)
            _name_values(axes, _names(names, columns, "label")[column], spreads[:, :, column])
        by = f", ordered by the median of {_names(names, columns, 'label')[0]}" if drawn > 1 else ", ordered by median"
        axes.set_xlabel(f"client{by} (dot: median, bar: middle half, line: 5% to 95% of its labels)")
        _draw_sizes(figure.add_subplot(grid[:, 1]), sizes, num_seen)


def _size(rows: int) -> tuple[float, float]:
    """Return the size of a picture with so many rows, in inches."""
    return 10.5, float(np.clip(1.6 + 0.24 * rows, 3.4, 6.5))


def _whom(n: int, shown: Array, title: str) -> str:
    """Return of whom a picture is, for its title."""
    few = f"{len(shown)} of {n:,} clients" if len(shown) < n else counted(n, "client")
    return f"{few}{f', {title}' if title else ''}"


def _names(names: Sequence[str], count: int, kind: str = "") -> list[str]:
    """Return short names of classes, labels or columns; their numbers if they have no names."""
    if len(names) == count:
        return [shorten(name, 24, placeholder="…") or "?" for name in names]
    return [kind] if kind and count == 1 else [f"{kind} {k}".strip() for k in range(count)]


def _sample_clients(n: int, num_seen: int) -> Array:
    """Return at most MOST_SHOWN clients, evenly spaced, with some of each group that exists."""
    if n <= MOST_SHOWN:
        return np.arange(n)
    unseen = n - num_seen
    shown = max(min(unseen, 6), round(MOST_SHOWN * unseen / n))
    shown = min(shown, MOST_SHOWN - min(num_seen, 6))
    parts = [(0, num_seen, MOST_SHOWN - shown), (num_seen, n, shown)]
    return np.concatenate([np.linspace(low, high - 1, k).round().astype(np.int64) for low, high, k in parts if k])


def _draw_bubbles(figure: Figure, axes: Axes, shares: Array, seen: Array) -> None:
    """Draw a bubble for each of the shares [clients, rows] above 0."""
    client, row = np.nonzero(shares)
    share = shares[client, row]
    # The largest bubble fills its cell.
    wide, high = figure.get_size_inches() * 72
    cell = min(0.62 * wide / len(shares), 0.62 * high / shares.shape[1])
    area = (0.95 * cell) ** 2 * share / share.max(initial=1e-9)
    colours = np.where(seen[client], SEEN, UNSEEN)
    axes.scatter(client, row, s=area, c=colours.tolist(), alpha=0.8, linewidths=0, clip_on=False)


def _draw_cells(figure: Figure, axes: Axes, table: Array, name: str, log: bool = False) -> None:
    """Draw a cell for each number [clients, rows] above 0."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    # Logarithmic, so that a class with few samples stays visible beside a class with many.
    norm = LogNorm(1, max(2.0, float(table.max()))) if log else Normalize(0, max(1.0, float(table.max())))
    colours = LinearSegmentedColormap.from_list("visible", colormaps["YlGnBu"](np.linspace(0.25, 1, 64)))
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": colours, "norm": norm}
    image = axes.imshow(np.ma.masked_equal(table.T, 0), **look)
    add_colour_bar(figure, axes, image, name, format="{x:,.0f}")
    axes.set_xlabel("client")


def _draw_spreads(axes: Axes, spreads: Array, seen: Array) -> None:
    """Draw the percentiles [clients, 5] of each client's labels as a line, a bar and a dot."""
    low, quarter, median, three_quarters, high = spreads.T
    place, colours = np.arange(len(spreads)), np.where(seen, SEEN, UNSEEN).tolist()
    wide = float(np.clip(300 / len(spreads), 3, 11))
    axes.vlines(place, low, high, colors=colours, linewidth=1.2)
    axes.vlines(place, quarter, three_quarters, colors=colours, linewidth=wide, alpha=0.55)
    axes.scatter(place, median, s=(0.7 * wide) ** 2, c=colours, edgecolors="white", linewidths=0.8, zorder=3)
    axes.grid(axis="y")


def _name_values(axes: Axes, name: str, spreads: Array) -> None:
    """Name the axis of labels; it is logarithmic if all are positive and some are far larger than others."""
    from matplotlib.ticker import StrMethodFormatter

    axes.set_xticks([])
    least, most = float(spreads.min()), float(spreads.max())
    if least > 0 and most >= SKEW * least:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        name += " (log scale)"
    axes.set_ylabel(name)


def _name_rows(axes: Axes, what: str, names: Sequence[str]) -> None:
    rows = len(names)
    step = 1 if rows <= MOST_NAMED else -(-rows // 13)
    axes.set_yticks(range(0, rows, step), labels=[names[k] for k in range(0, rows, step)])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_ylabel(what)
    axes.set_xticks([])
    axes.tick_params(length=0)


def _divide(axes: Axes, seen: int, shown: int, names: bool = True) -> None:
    """Draw a line between seen and unseen clients, and label both sides."""
    axes.set_xlim(-0.8, shown - 0.2)
    sides = [("seen", SEEN, -0.5, seen - 0.5), ("unseen", UNSEEN, seen - 0.5, shown - 0.5)]
    for name, colour, start, end in sides if names else ():
        if end > start:
            where = (start + end) / 2
            axes.text(where, 1.0, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", color=colour)
    if 0 < seen < shown:
        axes.axvline(seen - 0.5, color=INK, linewidth=1.2)


def _draw_sizes(axes: Axes, sizes: Array, num_seen: int) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    parts = [sizes[:num_seen], sizes[num_seen:]]
    axes.set_title("Samples per client", pad=22)
    low, high = int(sizes.min()), int(sizes.max())
    if low == high:  # show the number instead of a single bar
        axes.axis("off")
        axes.text(0.5, 0.5, f"{low:,}", transform=axes.transAxes, ha="center", va="bottom", fontsize=26, color=SEEN)
        axes.text(0.5, 0.46, "every client", transform=axes.transAxes, ha="center", va="top")
        return
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylabel("clients")
    spread = f"least {low:,}, median {np.median(sizes):,.0f},\nmost {high:,}"
    if high >= SKEW * max(1, low):
        # Edges lie between integers here, too.
        bins = np.unique(np.floor(np.geomspace(max(1, low), high + 1, 18))) - 0.5
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"training samples (log scale)\n{spread}")
    else:
        # Bin edges lie between integers, so that few different values get one bar each.
        bins = np.linspace(low - 0.5, high + 0.5, min(24, high - low + 1) + 1)
        axes.set_xlabel(f"training samples\n{spread}")
    axes.hist(parts, bins=bins.tolist(), stacked=True, color=[SEEN, UNSEEN], alpha=0.8, rwidth=0.92)
