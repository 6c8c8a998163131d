"""`pefll show`: tables and curves in the terminal, pictures in a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pefll.core.errors import unknown
from pefll.core.progress import say
from pefll.core.wording import first_few
from pefll.report.comparison import TABLES, comparison
from pefll.report.groups import group_runs, has_curve, names_of, repeated_note
from pefll.report.plots import FORMATS, curves, descriptor_map
from pefll.report.runs import StoredRun, different_data, read_runs, same_metric
from pefll.report.table import columns_table, costs_table, grouped_table, runs_table
from pefll.report.text import run_plot, sparklines
from pefll.runs.record import RunFolder, metric_word


def show(
    paths: Sequence[Path],
    out: Path | None,
    console: Console,
    formats: Sequence[str] = ("png",),
    tables: Sequence[str] = (),
    measures: Sequence[str] = (),
    intervals: bool = False,
) -> list[Path]:
    """Print tables and curves of runs, which may be unfinished; write pictures and tables, and return their paths.

    The pictures are curves.png, and descriptors.png for runs with descriptors. Runs of different tasks have curves of
    their own. Without matplotlib there are no pictures.

    Args:
        paths: run folders.
        out: the folder for files; None for the first run's folder.
        console: for tables and curves.
        formats: formats of the pictures: png, pdf, svg.
        tables: formats of the comparison of finished runs, `comparison.md` and so on: md, tex, csv.
        measures: what the comparison compares; see `comparison.compare`.
        intervals: whether the comparison also has differences from the best rows.
    """
    for given, known, what in ((formats, FORMATS, "picture format"), (tables, TABLES, "table format")):
        for name in given:
            if name not in known:
                raise unknown(what, name, known)
    runs = read_runs([RunFolder(path) for path in paths])
    if not runs:
        return []
    compared = comparison(runs, measures, intervals=intervals) if tables else None  # before anything is printed
    for run in runs:
        if age := run.folder.note_of_age():
            say(console, age)
    # Seeds of one run have the same columns, and several runs would fill the screen.
    columns = columns_table(runs[0]) if len({run.folder.path.parent for run in runs}) == 1 else None
    of_metrics = [make(same) for same in same_metric(runs) for make in (runs_table, grouped_table)]
    for table in (*of_metrics, costs_table(runs), columns):
        if table is not None:
            console.print(table)
            console.print()
    for same in same_metric(runs):
        if data := different_data(same):
            what = "accuracies" if same[0].metric == "per_sample" else f"{metric_word(same[0].metric)} figures"
            say(console, f"These runs have different data ({'; '.join(data)}), so their {what} cannot be compared.\n")
        if note := repeated_note(group_runs([run for run in same if run.finished])):
            say(console, f"{note}\n")
    _print_curves(runs, console)
    target = runs[0].folder.path if out is None else out
    written = _draw(runs, target, console, formats)
    if compared is not None:
        for name in tables:
            written.append(target / f"comparison.{name}")
            compared.write(written[-1])
            _say_written(written[-1], console)
        if compared.unfinished:
            say(console, f"The comparison leaves out unfinished runs: {first_few(compared.unfinished)}.")
    return written


def _print_curves(runs: list[StoredRun], console: Console) -> None:
    with_history = [run for run in runs if run.history]
    if not with_history:
        return
    if len(runs) == 1:
        console.print(run_plot(with_history[0], width=max(20, min(72, console.width - 8))))
    else:
        for same in same_metric(with_history):
            console.print(sparklines(same))
    console.print()


def _draw(runs: list[StoredRun], out: Path, console: Console, formats: Sequence[str]) -> list[Path]:
    if find_spec("matplotlib") is None:
        console.print("No pictures: drawing needs matplotlib: pip install matplotlib", highlight=False)
        return []
    drawings: list[tuple[str, Callable[[Path], None]]] = []
    if with_curve := [run for run in runs if has_curve(run)]:
        for number, same in enumerate(same_metric(with_curve)):
            name = f"curves-{same[0].metric}" if number else "curves"
            drawings.append((name, partial(curves, [run.folder for run in same])))
    described = [run for run in runs if run.folder.descriptors_file.is_file()]
    for run, name in zip(described, _names(described, alone=len(runs) == 1), strict=True):
        drawings.append((name, partial(descriptor_map, run.folder)))
    written = []
    for name, draw in drawings:
        for form in formats:
            written.append(out / f"{name}.{form}")
            draw(written[-1])
            _say_written(written[-1], console)
    return written


def _say_written(path: Path, console: Console) -> None:
    console.print(Text(f"wrote {path}"), soft_wrap=True)  # one line, so that a user can copy it


def _names(runs: list[StoredRun], alone: bool) -> list[str]:
    """Return a file name, without ending, for the descriptors of each run; equal names get a number."""
    if alone:
        return ["descriptors"] * len(runs)
    names = [re.sub(r"[^\w.-]+", "-", name) for name in names_of(runs)]
    return [
        f"descriptors-{name}{f'-{names[: place + 1].count(name)}' if names.count(name) > 1 else ''}"
        for place, name in enumerate(names)
    ]
