"""Plots of runs as PNG, PDF or SVG; the file's extension chooses the format.

matplotlib is optional and slow to import, so functions import it when they draw. They do not use pyplot, so they need
no display and leave no global state.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, write_whole
from pefll.core.wording import counted
from pefll.report.descriptors import Array, Descriptors, distances, mean_correlation, principal_plane, read_descriptors
from pefll.report.groups import SeedGroup, group_runs
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
MOST_DOTS = 3_000
MOST_MARKS = 1_500  # clients with a mark of their own; more of them overlap
CELLS = 44  # hexagons across a picture
SKEW = 20  # an axis is logarithmic if its largest value is so many times its smallest
MOST_LETTERS = 160  # in one line across the picture
MOST_BESIDE = 24  # letters of a name beside the end of its line; names that are longer, or lists, are in the legend
_STYLES: dict[str, Any] = {"seen": "-", "unseen": (0, (3.2, 1.8))}  # line styles

# matplotlib has one style for all threads, and threads that draw at once would leave theirs behind.
_DRAWING = threading.RLock()
_STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#b0b0b0"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "text.parse_math": False,  # a name may have dollar signs
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
    """Draw the curves of runs; see `draw_curves`."""
    draw_curves(read_runs(folders), out)


def draw_curves(runs: Sequence[StoredRun], out: Path, named: Sequence[SeedGroup] = ()) -> None:
    """Draw validation accuracy, or another task's metric, over rounds and over megabytes sent.

    Lines are solid for seen clients and dashed for unseen clients. Several seeds are drawn as their mean, with a band
    of one standard deviation. A dot marks the best round on seen clients. The title warns if runs have different data.
    Runs without an evaluation are ignored. `named` has the groups of the runs, if these have names.
    """
    runs = [run for run in runs if run.history]
    groups = [replace(group, runs=own) for group in named if (own := [run for run in group.runs if run.history])]
    metrics = [same[0].metric for same in same_metric(runs)]
    if len(metrics) > 1:
        raise PefllError(
            f"these runs have different metrics ({', '.join(metrics)}); draw the runs of each task alone",
            code="PEFLL-O500",
        )
    share = in_per_cent(runs)
    found = [curve for group in groups or group_runs(runs) if len((curve := _curve(group, share)).rounds)]
    if not found:
        raise PefllError(
            "no run has an evaluation on validation samples; train for more rounds, or choose other runs",
            code="PEFLL-O006",
        )
    name, _, unit = metric_words(runs).partition(" in ")
    beside = all(len(curve.label) <= MOST_BESIDE and not curve.has_several_settings for curve in found)
    with drawing(out, (10.5, 4.1 if beside else 4.1 + 0.21 * (len(found) + 2))) as figure:
        from matplotlib.ticker import MaxNLocator

        communicates = any(curve.megabytes[-1] > 0 for curve in found)
        panels = figure.subplots(1, 2, sharey=True) if communicates else [figure.subplots()]
        for axes, by in zip(panels, ("rounds", "megabytes"), strict=False):
            axes.grid(axis="y")
            axes.set_title(f"Validation {name} over {'rounds' if by == 'rounds' else 'data sent'}")
            for curve, colour in zip(found, itertools.cycle(LINES), strict=False):
                _draw_curve(axes, curve, by, colour)
            axes.set_xlim(left=0)
        panels[0].set_xlabel("round")
        panels[0].xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10], integer=True))
        panels[0].set_ylabel(f"validation {name}{unit and ', ' + unit}")
        if beside:
            _label_ends(panels[0], found)
        if communicates:
            _megabyte_axis(panels[1], [curve.megabytes[-1] for curve in found])
        _line_legend(figure, found, names=not beside)
        if data := different_data(runs):
            # The warning is printed too, but some readers only see the picture.
            note = f"These runs have different data and cannot be compared: {'; '.join(data)}"
            text = shorten(note, MOST_LETTERS, placeholder=" …")
            figure.suptitle(text, x=0.01, ha="left", fontsize=9.5, color=INK)


def descriptor_map(folder: RunFolder, out: Path) -> None:
    """Draw the descriptors of a run; see `draw_descriptors`."""
    draw_descriptors(read_descriptors(folder), out)


def draw_descriptors(found: Descriptors, out: Path) -> None:
    """Draw a run's descriptors in their principal plane, and their distances.

    A client's colour is its most frequent class or label; if labels are numbers, the mean of its labels. The second
    panel shows descriptor distance against label-distribution distance.
    """
    plane, shares = principal_plane(found.descriptors)
    d_v, d_pi = distances(found)
    with drawing(out, (10.5, 4.6)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        left.set_title(f"Descriptors of {counted(len(plane), 'client')} in their principal plane")
        if found.means is not None:
            _draw_values(figure, left, plane, found.means, found.seen, f"mean {_label_name(found)} of a client")
        else:
            kind = "class" if found.labels == "classes" else "label"
            _draw_plane(left, plane, _kinds(found.histograms, found.class_names), found.seen, kind)
        for axis, share, name in zip((left.xaxis, left.yaxis), shares, ("first", "second"), strict=True):
            axis.set_label_text(f"{name} principal direction ({100 * share:.0f}% of variance)")
            axis.set_ticks([])
        correlation = mean_correlation(d_v, d_pi)
        who = "all" if found.seen.all() else "unseen"
        value = f"{correlation:.2f}".replace("-", "−") if np.isfinite(correlation) else "undefined"
        right.set_title(f"Distances of {who} clients to others\n(Spearman's rank correlation {value})")
        _draw_distances(figure, right, d_v.ravel(), d_pi.ravel(), _distance_name(found))


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
    with _DRAWING, matplotlib.rc_context(style):
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

    label: str  # the title of the method, and settings with commas between them
    rounds: Array  # int64 [e]
    megabytes: Array  # float64 [e], mean over seeds
    mean: dict[str, Array]  # per group of clients, in per cent if the metric is a share, float64 [e]
    std: dict[str, Array] | None  # like mean; None for one seed
    best: int | None  # index of the best round
    per_cent: bool = True

    @property
    def has_several_settings(self) -> bool:
        """Whether the label names more than one setting."""
        return self.label.count(", ") > 1


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
        label=group.title if len(runs) == 1 else f"{group.title} (n={len(runs)})",
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


def _label_name(found: Descriptors) -> str:
    """Return the name of the numbers whose means are drawn."""
    return shorten(found.label_name, 24, placeholder="…") or "label"


def _distance_name(found: Descriptors) -> str:
    """Return what the distance of two clients' labels is."""
    if found.labels == "sets":
        return "distance of the shares of samples with each label"
    groups = f"\n({_label_name(found)} in ten groups of equal size)" if found.labels == "numbers" else ""
    return f"label-distribution distance{groups}"


def _draw_plane(axes: Axes, plane: Array, kinds: _Kinds, seen: Array, kind: str) -> None:
    from matplotlib.lines import Line2D

    _scale_equally(axes)
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
    axes.legend(handles=entries, title=f"most frequent\n{kind}{note}", alignment="left", **beside)


def _scale_equally(axes: Axes) -> None:
    axes.set_aspect("equal", adjustable="datalim")  # equal scales keep distances comparable
    axes.margins(0.06)


def _draw_values(figure: Figure, axes: Axes, plane: Array, values: Array, seen: Array, name: str) -> None:
    """Draw each client in the colour of its value; many of them as hexagons in the colour of their mean."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
    from matplotlib.lines import Line2D

    _scale_equally(axes)
    x, y = plane.T
    low, high = float(values.min()), float(values.max())
    skewed = low > 0 and high >= SKEW * low
    norm = LogNorm(low, high) if skewed else Normalize(low, high)
    colours = LinearSegmentedColormap.from_list("dark", colormaps["viridis"](np.linspace(0, 0.9, 64)))
    dense = len(plane) > MOST_MARKS
    look: dict[str, Any] = {"ls": "", "color": FAINT, "marker": "h" if dense else "o"}
    entries = [Line2D([], [], label="clients" if dense else "seen client", mew=0, ms=8 if dense else 6, **look)]
    if dense:
        axes.hexbin(x, y, C=values, gridsize=CELLS, norm=norm, cmap=colours, linewidths=0.2)
        if not seen.all():
            axes.scatter(x[~seen], y[~seen], s=3, color="black", linewidths=0, zorder=3)
            entries.append(Line2D([], [], color="black", ls="", marker="o", ms=2.5, label="unseen client"))
        name = f"{name}, mean of a cell"
    else:
        size = float(np.clip(9000 / len(plane), 9, 46))
        shade = colours(norm(values))
        axes.scatter(x[seen], y[seen], s=size, color=shade[seen], alpha=0.85, linewidths=0)
        if not seen.any():
            entries = []
        if not seen.all():
            hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": shade[~seen], "linewidths": 1.5}
            axes.scatter(x[~seen], y[~seen], s=1.8 * size + 20, **hollow)
            entries.append(Line2D([], [], label="unseen client", mfc="none", mew=1.5, ms=8, **look))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.07), "ncols": 2, "borderaxespad": 0.2}
    axes.legend(handles=entries, **place)
    label = fill(f"{name} (log scale)" if skewed else name, 36)
    add_colour_bar(figure, axes, ScalarMappable(norm, colours), label, format="{x:,g}")


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


def _draw_distances(figure: Figure, axes: Axes, d_v: Array, d_pi: Array, name: str) -> None:
    axes.set_xlabel(name)
    axes.set_ylabel("descriptor distance")
    if len(d_v) <= MOST_DOTS:
        few = 1 - len(d_v) / MOST_DOTS
        axes.scatter(d_pi, d_v, s=12 + 20 * few**8, color=SEEN, alpha=0.35 + 0.4 * few**8, linewidths=0)
    else:
        cells = axes.hexbin(d_pi, d_v, gridsize=34, bins="log", cmap="Blues", mincnt=1, linewidths=0.2)
        add_colour_bar(figure, axes, cells, "pairs of clients (log scale)", format="{x:,.0f}")
    axes.set_ylim(bottom=0)


def add_colour_bar(figure: Figure, axes: Axes, drawn: Any, label: str, **look: Any) -> None:
    """Draw the colour bar of what is drawn beside the axes."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogFormatter

    bar = figure.colorbar(drawn, ax=axes, label=label, pad=0.02, **look)
    bar.outline.set_visible(False)
    if isinstance(drawn.norm, LogNorm):  # plain numbers where the bar is too short for two powers of ten
        bar.ax.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
