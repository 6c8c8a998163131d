"""`pefll show`: tables and curves in the terminal, pictures in a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pefll.core.progress import say
from pefll.report.plots import curves, descriptor_map
from pefll.report.runs import StoredRun, different_data, read_runs
from pefll.report.table import costs_table, grouped_table, runs_table, same_metric
from pefll.report.text import run_plot, sparklines
from pefll.runs.record import RunFolder


def show(paths: list[Path], out: Path | None, console: Console) -> list[Path]:
    """Print tables and curves of runs, which may be unfinished; draw pictures and return their paths.

    The pictures are curves.png, and descriptors.png for runs with descriptors. Runs of different tasks have pictures of
    their own. They are in the folder `out`, by default the first run's folder. Without matplotlib there are no
    pictures.
    """
    runs = read_runs([RunFolder(path) for path in paths])
    if not runs:
        return []
    for run in runs:
        if age := run.folder.note_of_age():
            say(console, age)
    of_metrics = [make(same) for same in same_metric(runs) for make in (runs_table, grouped_table)]
    for table in (*of_metrics, costs_table(runs)):
        if table is not None:
            console.print(table)
            console.print()
    if data := different_data(runs):
        say(console, f"These runs have different data ({'; '.join(data)}), so their accuracies cannot be compared.\n")
    _print_curves(runs, console)
    return _draw(runs, runs[0].folder.path if out is None else out, console)


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


def _draw(runs: list[StoredRun], out: Path, console: Console) -> list[Path]:
    if find_spec("matplotlib") is None:
        console.print("No pictures: drawing needs matplotlib: pip install 'pefll\\[plot]'", highlight=False)
        return []
    drawings: list[tuple[Path, Callable[[Path], None]]] = []
    if any(run.history for run in runs):
        for number, same in enumerate(same_metric([run for run in runs if run.history])):
            name = "curves.png" if not number else f"curves-{same[0].metric}.png"
            drawings.append((out / name, partial(curves, [run.folder for run in same])))
    described = [run.folder for run in runs if run.folder.descriptors_file.is_file()]
    for folder, name in zip(described, _names(described, alone=len(runs) == 1), strict=True):
        drawings.append((out / name, partial(descriptor_map, folder)))
    for path, draw in drawings:
        draw(path)
        console.print(Text(f"wrote {path}"), soft_wrap=True)  # one line, so that a user can copy it
    return [path for path, _ in drawings]


def _names(folders: list[RunFolder], alone: bool) -> list[str]:
    """Return a file name for the descriptors of each run; runs with the same name get a number."""
    if alone:
        return ["descriptors.png"] * len(folders)
    names = [folder.path.resolve().name for folder in folders]
    return [
        f"descriptors-{name}{f'-{names[: place + 1].count(name)}' if names.count(name) > 1 else ''}.png"
        for place, name in enumerate(names)
    ]
