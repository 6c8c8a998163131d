"""Plots of runs and federations as PNG, PDF or SVG; the file's extension chooses the format.

matplotlib is optional and slow to import, so functions import it when they draw. They do not use pyplot, so they need
no display and leave no global state.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, write_whole
from pefll.core.wording import counted
from pefll.report.descriptors import Array, distances, mean_correlation, principal_plane, read_descriptors
from pefll.report.groups import SeedGroup, group_runs, note_of_unseen
from pefll.report.runs import StoredRun, different_data, in_per_cent, read_runs, same_metric
from pefll.report.table import metric_words
from pefll.runs.record import GROUPS, RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, without black, and without yellow, which is too light for a line on white.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6F4E37", "#555555")
# Colours of classes. They maximise the smallest OKLab distance between any two, also for red-green colour-blind
# readers. None is grey. Classes k and k + 6 share a marker, so their colours differ most.
CLASSES = (
    *("#377eb8", "#cc3311", "#ffa90e", "#f48fb1", "#332288", "#5c3317"),
    *("#b2df8a", "#832db6", "#e7298a", "#882255", "#33bbee", "#999933"),
)
MARKERS = ("o", "^", "s", "v", "D", "X")
SEEN, UNSEEN = "#0072B2", "#D55E00"
INK, FAINT = "#333333", "#8a8a8a"
FORMATS = ("png", "pdf", "svg")
MOST_SHOWN = 60
MOST_DOTS = 3_000
MOST_MARKS = 1_500  # clients with a mark of their own; more of them overlap
CELLS = 44  # hexagons across a picture
SKEW = 20  # an axis is logarithmic if its largest value is so many times its smallest
MOST_LETTERS = 160  # in one line across the picture
MOST_BESIDE = 24  # letters of a name beside the end of its line; names that are longer, or lists, are in the legend
_STYLES: dict[str, Any] = {"seen": "-", "unseen": (0, (3.2, 1.8))}  # line styles

_STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#b0b0b0"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.handletextpad": 0.4,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "savefig.dpi": 160,
    "pdf.fonttype": 42,  # publishers refuse the default, Type 3
}


def curves(folders: Sequence[RunFolder], out: Path) -> None:
    """Draw validation accuracy, or another task's metric, over rounds and over megabytes sent.

    Lines are solid for seen clients and dashed for unseen clients. Several seeds are drawn as their mean, with a band
    of one standard deviation. A dot marks the best round on seen clients. The title warns if runs have different data,
    and says whose unseen clients have no line.
    Runs without an evaluation are ignored.
    """
    runs = [run for run in read_runs(folders) if run.history]
    metrics = [same[0].metric for same in same_metric(runs)]
    if len(metrics) > 1:
        raise PefllError(
            f"these runs have different metrics ({', '.join(metrics)}); draw the runs of each task alone",
            code="PEFLL-O500",
        )
    share = in_per_cent(runs)
    found = [curve for group in group_runs(runs) if len((curve := _curve(group, share)).rounds)]
    if not found:
        raise PefllError(
            "no run has an evaluation on validation samples; train for more rounds, or choose other runs",
            code="PEFLL-O006",
        )
    name, _, unit = metric_words(runs).partition(" in ")
    beside = all(len(curve.label) <= MOST_BESIDE and ", " not in curve.label for curve in found)
    with drawing(out, (10.5, 4.1 if beside else 4.1 + 0.21 * (len(found) + 2))) as figure:
        communicates = any(curve.megabytes[-1] > 0 for curve in found)
        panels = figure.subplots(1, 2, sharey=True) if communicates else [figure.subplots()]
        for axes, by in zip(panels, ("rounds", "megabytes"), strict=False):
            axes.grid(axis="y")
            axes.set_title(f"Validation {name} over {'rounds' if by == 'rounds' else 'data sent'}")
            for curve, colour in zip(found, itertools.cycle(LINES), strict=False):
                _draw_curve(axes, curve, by, colour)
            axes.set_xlim(left=0)
        panels[0].set_xlabel("round")
        panels[0].set_ylabel(f"validation {name}{unit and ', ' + unit}")
        if beside:
            _label_ends(panels[0], found)
        if communicates:
            _megabyte_axis(panels[1], [curve.megabytes[-1] for curve in found])
        _line_legend(figure, found, names=not beside)
        notes = [note] if (note := note_of_unseen(runs)) else []
        if data := different_data(runs):
            # The warning is printed too, but some readers only see the picture.
            notes.append(f"These runs have different data and cannot be compared: {'; '.join(data)}")
        if notes:
            text = "\n".join(shorten(note, MOST_LETTERS, placeholder=" …") for note in notes)
            figure.suptitle(text, x=0.01, ha="left", fontsize=9.5, color=INK)


def descriptor_map(folder: RunFolder, out: Path) -> None:
    """Draw a run's descriptors in their principal plane, and their distances.

    The second panel shows descriptor distance against label-distribution distance.
    """
    found = read_descriptors(folder)
    plane, shares = principal_plane(found.descriptors)
    d_v, d_pi = distances(found)
    with drawing(out, (10.5, 4.6)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        left.set_title(f"Descriptors of {counted(len(plane), 'client')} in their principal plane")
        _draw_plane(left, plane, _kinds(found.histograms, found.class_names), found.seen)
        for axis, share, name in zip((left.xaxis, left.yaxis), shares, ("first", "second"), strict=True):
            axis.set_label_text(f"{name} principal direction ({100 * share:.0f}% of variance)")
            axis.set_ticks([])
        correlation = mean_correlation(d_v, d_pi)
        who = "all" if found.seen.all() else "unseen"
        value = f"{correlation:.2f}".replace("-", "−") if np.isfinite(correlation) else "undefined"
        right.set_title(f"Distances of {who} clients to others\n(Spearman's rank correlation {value})")
        _draw_distances(figure, right, d_v.ravel(), d_pi.ravel())


def federation_picture(
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
    with drawing(out, (10.5, float(np.clip(1.6 + 0.24 * classes, 3.4, 6.5)))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 1))
        few = f"{len(shown)} of {n:,} clients" if len(shown) < n else counted(n, "client")
        left.set_title(f"Classes of {few}{f', {title}' if title else ''}", pad=22)
        (_draw_bubbles if classes <= 26 else _draw_heat)(figure, left, histograms[shown], shown < num_seen)
        _name_classes(left, classes, class_names)
        _divide(left, int((shown < num_seen).sum()), len(shown))
        _draw_sizes(right, histograms.sum(axis=1), num_seen)


def check_drawable(out: Path) -> None:
    """Raise PefllError if a figure cannot be drawn, because matplotlib is missing or the file's name has no format."""
    if find_spec("matplotlib") is None:
        raise _no_matplotlib()
    if out.suffix.removeprefix(".").lower() not in ("", *FORMATS):
        raise _no_format(out)


def _no_matplotlib() -> PefllError:
    return PefllError("drawing needs matplotlib: pip install matplotlib", code="PEFLL-O008")


def _no_format(out: Path) -> PefllError:
    return PefllError(f"cannot draw {out.name}; choose a name that ends in .png, .pdf or .svg", code="PEFLL-O009")


@contextmanager
def drawing(out: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure to draw on, and write the file when the block ends."""
    try:
        import matplotlib
        from matplotlib import font_manager
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _no_matplotlib() from error
    # Only installed fonts, because matplotlib warns about each missing font.
    wanted = ("Inter", "Helvetica Neue", "Helvetica", "Arial", "DejaVu Sans")
    installed = set(font_manager.get_font_names())
    fonts = {"font.family": "sans-serif", "font.sans-serif": [name for name in wanted if name in installed]}
    style: Any = _STYLE | fonts
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure
        content = io.BytesIO()
        try:
            figure.savefig(content, format=out.suffix.removeprefix(".") or "png")
        except ValueError as error:
            raise _no_format(out) from error
    make_folder(out.parent)
    write_whole(out, content.getvalue())


@dataclass(frozen=True, eq=False)
class _Curve:
    """The curves of one SeedGroup, at the e rounds that all its runs evaluated."""

    label: str
    rounds: Array  # int64 [e]
    megabytes: Array  # float64 [e], mean over seeds
    mean: dict[str, Array]  # per group of clients, in per cent if the metric is a share, float64 [e]
    std: dict[str, Array] | None  # like mean; None for one seed
    best: int | None  # index of the best round
    per_cent: bool = True


def _curve(group: SeedGroup, share: bool = True) -> _Curve:
    # An unfinished seed would shorten the curves of the others.
    runs = [run for run in group.runs if run.finished] or group.runs
    rounds = runs[0].rounds
    for run in runs[1:]:
        rounds = np.intersect1d(rounds, run.rounds)

    def at_rounds(run: StoredRun, values: Array) -> Array:
        return values[np.isin(run.rounds, rounds)]

    values = {who: np.array([at_rounds(run, run.validation(who, run.metric)) for run in runs]) for who in GROUPS}
    smaller = any(run.has_error(run.metric) for run in runs)
    values = {who: 100 * table if share else table for who, table in values.items() if not np.isnan(table).all()}
    if not values:
        rounds = rounds[:0]
    best = None
    if len(runs) == 1:
        marked = np.flatnonzero(rounds == runs[0].best_round)
        best = int(marked[0]) if len(marked) else None
    elif "seen" in values and not np.isnan(values["seen"]).any():
        mean = values["seen"].mean(axis=0)
        best = int(mean.argmin() if smaller else mean.argmax())
    return _Curve(
        label=group.label if len(runs) == 1 else f"{group.label} (n={len(runs)})",
        rounds=rounds,
        megabytes=np.mean([at_rounds(run, run.megabytes) for run in runs], axis=0),
        mean={who: table.mean(axis=0) for who, table in values.items()},
        std={who: table.std(axis=0, ddof=1) for who, table in values.items()} if len(runs) > 1 else None,
        best=best,
        per_cent=share,
    )


def _draw_curve(axes: Axes, curve: _Curve, by: str, colour: str) -> None:
    x = curve.rounds if by == "rounds" else curve.megabytes
    if by == "megabytes" and x[-1] == 0:
        return  # this method sends nothing
    for who, mean in curve.mean.items():
        axes.plot(x, mean, color=colour, linewidth=1.8, linestyle=_STYLES[who])
        if curve.std is not None:
            low, high = mean - curve.std[who], mean + curve.std[who]
            if curve.per_cent:
                low, high = np.clip(low, 0, None), np.clip(high, None, 100)
            axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
        if curve.best is not None:
            look: dict[str, Any] = {"color": colour, "markersize": 6, "mec": "white", "mew": 1.2}
            axes.plot(x[curve.best], mean[curve.best], "o", zorder=5, clip_on=False, **look)


def _label_ends(axes: Axes, found: Sequence[_Curve]) -> None:
    """Write each label beside the end of its first line, without overlaps."""
    from matplotlib.patheffects import withStroke

    last_round = max(int(curve.rounds[-1]) for curve in found) or 1
    axes.set_xlim(0, last_round)
    low, high = axes.get_ylim()
    lines = [next(iter(curve.mean.values())) for curve in found]
    ends = [float(known[-1]) if len(known := line[~np.isnan(line)]) else 0.0 for line in lines]
    places = _apart(ends, 0.065 * (high - low), low, high)
    for place, curve, colour in zip(places, found, itertools.cycle(LINES), strict=False):
        unfinished = curve.rounds[-1] < 0.95 * last_round
        axes.annotate(
            curve.label,
            (curve.rounds[-1], place),
            xytext=(6, -9 if unfinished else 0),  # lower, so that the label does not hide longer curves
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            zorder=6,
        )
    axes.set_ylim(low, high)


def _apart(places: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Return positions moved at least `step` apart; close neighbours are spread around their mean."""
    order = np.argsort(places, kind="stable")
    blocks: list[list[float]] = []  # [mean, members]
    for index in order:
        blocks.append([places[index], 1])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < step * (blocks[-1][1] + blocks[-2][1]) / 2:
            (a, m), (b, k) = blocks[-2:]
            blocks[-2:] = [[(a * m + b * k) / (m + k), m + k]]
    spread = [mean + step * (rank - (size - 1) / 2) for mean, size in blocks for rank in range(int(size))]
    shift = max(0.0, low - spread[0]) - max(0.0, spread[-1] - high)
    out = [0.0] * len(places)
    for index, place in zip(order, spread, strict=True):
        out[index] = place + shift
    return out


def _megabyte_axis(axes: Axes, totals: Sequence[float]) -> None:
    """Name the axis of data sent; it is logarithmic if one run sends far more than another."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    sent = [total for total in totals if total > 0]
    giga = max(sent) >= 5_000
    unit = f"{'GB' if giga else 'MB'} sent, down and up"
    if max(sent) >= SKEW * min(sent):
        axes.set_xscale("log")
        axes.autoscale(axis="x")
        axes.xaxis.set_minor_formatter(NullFormatter())
        unit += " (log scale)"
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda mb, _: f"{mb / 1000 if giga else mb:,g}"))


def _line_legend(figure: Figure, found: Sequence[_Curve], names: bool) -> None:
    """Draw the legend below the panels; with `names`, it also has the names of the curves."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = []
    for who, style in _STYLES.items():
        if any(who in curve.mean for curve in found):
            entries.append(Line2D([], [], color=FAINT, linewidth=1.8, linestyle=style, label=f"{who} clients"))
    if any(curve.best is not None for curve in found):
        entries.append(Line2D([], [], color=FAINT, marker="o", linestyle="", mec="white", label="best round"))
    if any(curve.std is not None for curve in found):
        entries.append(Patch(color=FAINT, alpha=0.25, linewidth=0, label="± 1 standard deviation"))
    if names:
        colours = zip(found, itertools.cycle(LINES), strict=False)
        labels = [(fill(curve.label, MOST_LETTERS), colour) for curve, colour in colours]
        entries[:0] = [Line2D([], [], color=colour, linewidth=1.8, label=label) for label, colour in labels]
    figure.legend(handles=entries, loc="outside lower left", ncols=1 if names else len(entries), labelcolor=INK)


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Kinds of clients by their most frequent class. Rare ones of many classes are one kind."""

    of_client: Array  # int64 [n], index into the lists
    names: list[str]
    colours: list[str]
    markers: list[str]


def _kinds(histograms: Array, class_names: Sequence[str]) -> _Kinds:
    main, classes = histograms.argmax(axis=1), histograms.shape[1]
    names = [shorten(name, 24, placeholder="…") or "?" for name in class_names or map(str, range(classes))]
    if classes <= len(CLASSES):
        return _Kinds(main, names, list(CLASSES[:classes]), [MARKERS[k % len(MARKERS)] for k in range(classes)])
    times = np.bincount(main, minlength=classes)
    often = np.argsort(-times, kind="stable")[: len(CLASSES) - 1]
    often = often[times[often] > 0]
    place = np.full(classes, len(often))
    place[often] = np.arange(len(often))
    rest = int(np.count_nonzero(times)) - len(often)
    return _Kinds(
        place[main],
        [*(names[k] for k in often), f"{counted(rest, 'other class')}"],
        [*CLASSES[: len(often)], FAINT],
        [*(MARKERS[k % len(MARKERS)] for k in range(len(often))), "o"],
    )


def _draw_plane(axes: Axes, plane: Array, kinds: _Kinds, seen: Array) -> None:
    from matplotlib.lines import Line2D

    axes.set_aspect("equal", adjustable="datalim")  # equal scales keep distances comparable
    axes.margins(0.06)
    dense = len(plane) > MOST_MARKS
    (below, note) = _draw_density(axes, plane, kinds, seen) if dense else (_draw_marks(axes, plane, kinds, seen), "")
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.07), "ncols": 2, "borderaxespad": 0.2}
    axes.add_artist(axes.legend(handles=below, **place))
    entries = [
        Line2D([], [], ls="", mew=0, marker="h" if dense else kinds.markers[k], color=kinds.colours[k], label=name)
        for k, name in enumerate(kinds.names)
        if (kinds.of_client == k).any()
    ]
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "handlelength": 1.2}
    axes.legend(handles=entries, title=f"most frequent\nclass{note}", alignment="left", **beside)


def _draw_marks(axes: Axes, plane: Array, kinds: _Kinds, seen: Array) -> list[Any]:
    """Draw a filled mark for each seen client, and a hollow one for each unseen client; return a legend's entries.

    Hollow marks are drawn last and are larger, so that a seen client of the same place is visible within.
    """
    from matplotlib.lines import Line2D

    size = float(np.clip(9000 / len(plane), 9, 46))
    entries = []
    for name, group, hollow in (("seen client", seen, False), ("unseen client", ~seen, True)):
        if not group.any():
            continue
        for k, colour in enumerate(kinds.colours):
            x, y = plane[group & (kinds.of_client == k)].T
            if hollow:
                look: dict[str, Any] = {"s": 1.8 * size + 20, "facecolors": "none", "edgecolors": colour}
                axes.scatter(x, y, marker=kinds.markers[k], linewidths=1.5, **look)
            else:
                axes.scatter(x, y, marker=kinds.markers[k], s=size, color=colour, alpha=0.85, linewidths=0)
        edge: dict[str, Any] = {"mfc": "none", "mew": 1.5, "ms": 8} if hollow else {"mew": 0, "ms": 6}
        entries.append(Line2D([], [], color=FAINT, ls="", marker="o", label=name, **edge))
    return entries


def _draw_density(axes: Axes, plane: Array, kinds: _Kinds, seen: Array) -> tuple[list[Any], str]:
    """Draw hexagons in the colour of their most frequent kind, darker for more clients, and a dot per unseen client.

    Return the entries of a legend, and a note for the title of the kinds' legend.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    x, y = plane.T
    wide, high = (max(float(np.ptp(values)), 1e-12) for values in (x, y))
    # Regular hexagons on axes of equal scale; neighbouring rows are √3/2 of a width apart.
    grid = (CELLS, max(1, round(CELLS * high / wide / 3**0.5)))
    counts = axes.hexbin(x, y, gridsize=grid, mincnt=1)
    many = np.asarray(counts.get_array())
    counts.remove()
    most = axes.hexbin(x, y, C=kinds.of_client, gridsize=grid, reduce_C_function=_mode, linewidths=0.2)
    kind = np.asarray(most.get_array()).astype(int)
    share = 0.3 + 0.7 * np.log(many) / max(1e-12, float(np.log(many.max())))
    base = np.array([to_rgb(colour) for colour in kinds.colours])[kind]
    most.set_array(None)
    most.set_facecolor(1 - share[:, None] * (1 - base))
    most.set_edgecolor("face")
    entries = [Line2D([], [], color=FAINT, ls="", marker="h", ms=8, label="clients")]
    if not seen.all():
        axes.scatter(x[~seen], y[~seen], s=3, color="black", linewidths=0, zorder=3)
        entries.append(Line2D([], [], color="black", ls="", marker="o", ms=2.5, label="unseen client"))
    return entries, f"\n(darker: more,\nup to {int(many.max()):,} clients)"


def _mode(values: Any) -> int:
    return int(np.bincount(np.asarray(values, dtype=np.int64)).argmax())


def _draw_distances(figure: Figure, axes: Axes, d_v: Array, d_pi: Array) -> None:
    axes.set_xlabel("label-distribution distance")
    axes.set_ylabel("descriptor distance")
    if len(d_v) <= MOST_DOTS:
        few = 1 - len(d_v) / MOST_DOTS
        axes.scatter(d_pi, d_v, s=12 + 20 * few**8, color=SEEN, alpha=0.35 + 0.4 * few**8, linewidths=0)
    else:
        cells = axes.hexbin(d_pi, d_v, gridsize=34, bins="log", cmap="Blues", mincnt=1, linewidths=0.2)
        _add_colour_bar(figure, axes, cells, "pairs of clients", format="{x:,.0f}")
    axes.set_ylim(bottom=0)


def _add_colour_bar(figure: Figure, axes: Axes, drawn: Any, label: str, **look: Any) -> None:
    figure.colorbar(drawn, ax=axes, label=label, pad=0.02, **look).outline.set_visible(False)


def _sample_clients(n: int, num_seen: int) -> Array:
    """Return at most MOST_SHOWN clients, evenly spaced, with some of each group that exists."""
    if n <= MOST_SHOWN:
        return np.arange(n)
    unseen = n - num_seen
    shown = max(min(unseen, 6), round(MOST_SHOWN * unseen / n))
    shown = min(shown, MOST_SHOWN - min(num_seen, 6))
    parts = [(0, num_seen, MOST_SHOWN - shown), (num_seen, n, shown)]
    return np.concatenate([np.linspace(low, high - 1, k).round().astype(np.int64) for low, high, k in parts if k])


def _draw_bubbles(figure: Figure, axes: Axes, histograms: Array, seen: Array) -> None:
    client, label = np.nonzero(histograms)
    # Shares, because counts would make the bubbles of small clients invisible. The other panel shows the counts.
    share = histograms[client, label] / histograms.sum(axis=1)[client]
    # The largest bubble fills its cell.
    wide, high = figure.get_size_inches() * 72
    cell = min(0.62 * wide / len(histograms), 0.7 * high / histograms.shape[1])
    area = (0.95 * cell) ** 2 * share / share.max(initial=1e-9)
    colours = np.where(seen[client], SEEN, UNSEEN)
    axes.scatter(client, label, s=area, c=colours.tolist(), alpha=0.8, linewidths=0)
    axes.set_xlabel("client (area: a class's share of the client's samples)")


def _draw_heat(figure: Figure, axes: Axes, histograms: Array, seen: Array) -> None:
    del seen
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    table = np.ma.masked_equal(histograms.T, 0)
    # Logarithmic, so that a class with few samples stays visible beside a class with many.
    norm = LogNorm(vmin=1, vmax=max(2.0, float(histograms.max())))
    colours = LinearSegmentedColormap.from_list("visible", colormaps["YlGnBu"](np.linspace(0.25, 1, 64)))
    image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    _add_colour_bar(figure, axes, image, "samples (log scale)", format="{x:,.0f}")
    axes.set_xlabel("client")


def _name_classes(axes: Axes, classes: int, names: Sequence[str]) -> None:
    if len(names) != classes:
        names = [str(k) for k in range(classes)]
    step = 1 if classes <= 26 else -(-classes // 13)
    axes.set_yticks(range(0, classes, step), labels=[names[k] for k in range(0, classes, step)])
    axes.set_ylim(classes - 0.5, -0.5)
    axes.set_ylabel("class")
    axes.set_xticks([])
    axes.tick_params(length=0)


def _divide(axes: Axes, seen: int, shown: int) -> None:
    """Draw a line between seen and unseen clients, and label both sides."""
    axes.set_xlim(-0.8, shown - 0.2)
    sides = [("seen", SEEN, -0.5, seen - 0.5), ("unseen", UNSEEN, seen - 0.5, shown - 0.5)]
    for name, colour, start, end in sides:
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
        axes.set_xlabel(f"samples (log scale)\n{spread}")
    else:
        # Bin edges lie between integers, so that few different values get one bar each.
        bins = np.linspace(low - 0.5, high + 0.5, min(24, high - low + 1) + 1)
        axes.set_xlabel(f"samples\n{spread}")
    axes.hist(parts, bins=bins.tolist(), stacked=True, color=[SEEN, UNSEEN], alpha=0.8, rwidth=0.92)
