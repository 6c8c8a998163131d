"""Writes the page of an experiment: tables, verdicts on the paper's statements, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pefll.core.files import make_folder, write_csv, write_whole
from pefll.core.wording import counted
from pefll.experiments.comparison import digits, entry_markdown
from pefll.experiments.diverged import DivergedRuns
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, OPEN, Evidence, Verdict
from pefll.experiments.experiment import Panel
from pefll.report.runs import MISSING

_COLUMNS = (
    *("table", "line", "column", "clients", "measure", "rounds", "seeds", "mean", "std", "paper_mean", "paper_std"),
    *("interval", "verdict"),
)


def write_page(evidence: Evidence, folder: Path, figures: bool = True) -> list[Path]:
    """Write an experiment's Markdown, CSV and pictures, and return their paths.

    Args:
        evidence: results of the experiment.
        folder: folder for the files.
        figures: whether to draw pictures, if matplotlib is installed.
    """
    make_folder(folder)
    experiment = evidence.experiment
    can_draw = figures and find_spec("matplotlib") is not None
    drawn = experiment.draw(evidence, folder) if can_draw and experiment.draw else []
    page, table = (folder / f"{experiment.file_stem}.{ending}" for ending in ("md", "csv"))
    write_whole(page, markdown(evidence, drawn).encode())
    write_csv(table, rows(evidence))
    return [page, table, *drawn]


def markdown(evidence: Evidence, figures: Sequence[Path] = ()) -> str:
    """Return the page in Markdown."""
    experiment = evidence.experiment
    lines = [
        f"# {experiment.title}",
        "",
        f"    pefll reproduce {experiment.name}",
        "",
        experiment.about,
        "",
        f"Test accuracy in % after {_rounds(evidence)}, at the round with the best validation accuracy of seen "
        "clients. Mean ± standard deviation over seeds; the paper's in brackets.",
    ]
    if evidence.diverged:
        lines += ["", diverged_words(evidence.diverged)]
    for table in experiment.panels:
        lines += ["", f"## {table.title}", "", *_panel(evidence, table)]
    if experiment.sections:
        lines += ["", *experiment.sections(evidence)]
    for path in figures:
        lines += ["", f"![{path.stem}]({path.name})"]
    verdicts = evidence.verdicts()
    if verdicts:
        lines += ["", f"## {experiment.question}", "", *verdict_lines(verdicts)]
    return "\n".join(lines) + "\n"


def diverged_words(diverged: DivergedRuns) -> str:
    """Return a sentence about runs that diverged, with their seeds and precisions."""
    listed = []
    for where, seeds in diverged.items():
        words = ", ".join(f"seed {seed} in {' and '.join(precisions)}" for seed, precisions in seeds.items())
        listed.append(f"{where} ({words})")
    return f"These runs diverged and have no figures: {'; '.join(listed)}."


def _rounds(evidence: Evidence) -> str:
    """Return the rounds of training as text, cell by cell if they differ."""
    by_cell = {cell.title: cell.rounds_of(evidence.rounds) for cell in evidence.experiment.cells}
    if len(set(by_cell.values())) == 1:
        return counted(next(iter(by_cell.values())), "round")
    return ", ".join(f"{counted(rounds, 'round')} ({title})" for title, rounds in by_cell.items())


def markdown_table(headings: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *table)]


def _panel(evidence: Evidence, table: Panel) -> list[str]:
    places = [
        next((point for _, points in table.lines if (point := points[at])), None) for at in range(len(table.columns))
    ]
    seeds = [str(evidence.wanted[point.cell.name]) if point else "" for point in places]
    body = [
        ["*seeds*", *seeds],
    ] + [
        [heading, *(MISSING if point is None else entry_markdown(evidence.entry(point)) for point in points)]
        for heading, points in table.lines
    ]
    return markdown_table([table.corner, *table.columns], body)


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the statements with their verdicts, then a table of the figures."""
    statements = dict.fromkeys((verdict.text, verdict.place) for verdict in verdicts)
    lines, body = [], []
    for number, (text, place) in enumerate(statements, start=1):
        own = [verdict for verdict in verdicts if (verdict.text, verdict.place) == (text, place)]
        lines.append(f"{number}. {text} (`{place}`): **{overall(own)}**.")
        body += [[str(number), one.where, one.figure, one.interval, one.word] for one in own]
    note = (
        "Figures are percentage points unless stated otherwise. The 95% interval is from a paired bootstrap over "
        'clients, or from Student\'s t over seeds. "Not decided": the figure agrees, but not its whole interval.'
    )
    return [*lines, "", note, "", *markdown_table(["", "where", "figure", "95% interval", "verdict"], body)]


def overall(verdicts: Sequence[Verdict]) -> str:
    """Return one verdict for a statement from the verdicts on all its comparisons, as text."""
    known = [verdict for verdict in verdicts if verdict.word != NOTHING]
    words = [verdict.word for verdict in known]
    if not known:
        return NOTHING
    word = FAILS if FAILS in words else OPEN if OPEN in words else HOLDS
    missing = len(verdicts) - len(known)
    parts = [] if len(verdicts) == 1 else [f"{words.count(HOLDS)} of {len(known)} places hold"]
    parts += [f"{missing} without results"] if missing else []
    return f"{word} ({', '.join(parts)})" if parts else word


def rows(evidence: Evidence) -> list[dict[str, Any]]:
    """Return one row for each mean of the tables, and one for each verdict."""
    listed: list[dict[str, Any]] = []
    for table in evidence.experiment.panels:
        for heading, points in table.lines:
            for column, point in zip(table.columns, points, strict=True):
                if point is None:
                    continue
                entry = evidence.entry(point)
                listed.append(
                    {
                        "table": table.title,
                        "line": heading,
                        "column": column,
                        "clients": point.group,
                        "measure": point.measure,
                        "rounds": point.cell.rounds_of(evidence.rounds),
                        "seeds": entry.seeds,
                        "mean": digits(entry.mean, 2),
                        "std": digits(entry.std, 2),
                        "paper_mean": digits(point.paper[0] if point.paper else None, 1),
                        "paper_std": digits(point.paper[1] if point.paper else None, 1),
                    }
                )
    # No plus signs: a spreadsheet would read these cells as formulas.
    listed += [
        {
            "table": "statements",
            "line": verdict.text,
            "column": verdict.where,
            "mean": verdict.figure.replace("+", ""),
            "interval": verdict.interval.replace("+", ""),
            "verdict": verdict.word,
        }
        for verdict in evidence.verdicts()
    ]
    return [dict.fromkeys(_COLUMNS, "") | {"rounds": evidence.rounds} | row for row in listed]
