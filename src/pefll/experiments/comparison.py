"""Table 1 from result files: means over seeds, the paper's means, and significance tests over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.core.files import make_folder, write_csv, write_whole
from pefll.experiments.results import Result, accuracies
from pefll.experiments.searched import searched_lines
from pefll.experiments.table1 import OURS, PAPER, ROWS, TITLES, Cell
from pefll.report import mean_and_std
from pefll.report.runs import MISSING
from pefll.report.significance import Difference, Pair, paired_bootstrap
from pefll.runs.record import GROUPS

Found = dict[tuple[str, str], list[Result]]  # by the names of row and cell; one per seed, in the order of the seeds
Column = Mapping[str, Sequence[Result]]  # the results of each row in one cell
_OF_THE_PAPER = tuple(row for row in TITLES if any(row in column for column in PAPER.values()))
_HEADINGS = {"seen": "Clients that took part in training", "unseen": "Clients that were never seen"}


class Entry(NamedTuple):
    """One mean of the table, with the paper's mean."""

    group: str  # seen or unseen
    method: str
    cell: Cell
    mean: float | None  # over seeds, in per cent; None without results
    std: float | None  # None for fewer than two seeds
    seeds: int
    wanted: int  # number of seeds of the column
    paper: tuple[float, float] | None  # the paper's mean and standard deviation for this federation
    best: bool  # whether at least two methods are compared, and this mean is the best


class Lead(NamedTuple):
    """The lead of one of our methods over the best baseline in a cell."""

    group: str  # seen or unseen
    method: str
    cell: Cell
    baseline: str
    points: float  # difference of the two means, in percentage points
    difference: Difference | None  # a test over clients; None if the results lack counts for the same clients


Entries = dict[tuple[str, str, str], Entry]  # (group, method, cell's name) -> entry


@dataclass(frozen=True)
class Comparison:
    """The content of Table 1."""

    cells: Sequence[Cell]
    entries: Entries
    leads: list[Lead]
    more: Entries  # means over all seeds, for methods that have more seeds than their column
    more_leads: list[Lead]
    rounds: int


def compare(found: Found, cells: Sequence[Cell], rounds: int, seeds: Sequence[int]) -> Comparison:
    """Return Table 1 for these results.

    A column has the wanted seeds, and each other seed that all of the paper's methods have. Rows with more seeds are
    listed again in `more`, with all seeds. Their leads are computed only if the column's best baseline is among them.

    Args:
        found: all results of each method in each cell.
        cells: cells of the table, one per column.
        rounds: number of training rounds.
        seeds: seeds that every column should have.
    """
    table = Comparison(cells, {}, [], {}, [], rounds)
    for group in GROUPS:
        for cell in cells:
            every = {row: found.get((row, cell.name), []) for row in TITLES}
            existing = [{one["seed"] for one in every[row]} for row in _OF_THE_PAPER if every[row]]
            wanted = set(seeds).union(set.intersection(*existing) if existing else ())
            column = {row: [one for one in results if one["seed"] in wanted] for row, results in every.items()}
            longer = {row: results for row, results in every.items() if len(results) > len(column[row])}
            table.entries.update(_entries(column, group, cell, len(wanted)))
            table.leads.extend(_leads(column, group, cell))
            table.more.update(_entries(longer, group, cell, len(wanted)))
            if _best_baseline(column, group) in longer:
                table.more_leads.extend(_leads(longer, group, cell))
    return table


def _entries(column: Column, group: str, cell: Cell, wanted: int) -> Entries:
    means = _means(column, group)
    entries = {}
    for method, results in column.items():
        values = accuracies(results, group)
        mean, std = mean_and_std(values) if values else (None, None)
        paper = PAPER.get((cell.data, cell.clients), {}).get(method)
        place = 2 * GROUPS.index(group)
        entries[group, method, cell.name] = Entry(
            group=group,
            method=method,
            cell=cell,
            mean=mean,
            std=std,
            seeds=len(values),
            wanted=wanted,
            paper=(paper[place], paper[place + 1]) if paper else None,
            best=len(means) > 1 and mean == max(means.values()),
        )
    return entries


def _means(column: Column, group: str) -> dict[str, float]:
    every = {method: accuracies(results, group) for method, results in column.items()}
    return {method: mean_and_std(values)[0] for method, values in every.items() if values}


def _leads(column: Column, group: str, cell: Cell) -> list[Lead]:
    best = _best_baseline(column, group)
    if best is None:
        return []
    means = _means(column, group)
    leads = []
    for method in OURS:
        if method not in means:
            continue
        pairs = _pairs(column[method], column[best], group)
        points = means[method] - means[best]
        leads.append(Lead(group, method, cell, best, points, paired_bootstrap(pairs) if pairs else None))
    return leads


def _best_baseline(column: Column, group: str) -> str | None:
    baselines = {method: mean for method, mean in _means(column, group).items() if method not in OURS}
    return max(baselines, key=lambda method: baselines[method]) if baselines else None


def _pairs(ours: Sequence[Result], theirs: Sequence[Result], group: str) -> list[Pair]:
    """Return the counts of two methods on the same clients: one pair for each seed that both methods have."""
    others = {result["seed"]: result for result in theirs}
    pairs = []
    for mine in ours:
        other = others.get(mine["seed"], {})
        counts = [(result.get("client_counts") or {}).get(group) for result in (mine, other)]
        same_data = mine.get("data_sha256") == other.get("data_sha256")
        if same_data and counts[0] and counts[1] and sum(counts[0]["samples"]):
            parts = (counts[0]["samples"], counts[0]["correct"], counts[1]["correct"])
            pairs.append(Pair(*(np.array(part, dtype=np.int64) for part in parts)))
    return pairs


def write_tables(table: Comparison, folder: Path, name: str = "table1") -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV to the folder of results, and return the paths."""
    make_folder(folder)
    paths = [folder / f"{name}.{ending}" for ending in ("md", "tex", "csv")]
    write_whole(paths[0], (markdown(table) + _searches(table, folder / "tune")).encode())
    write_whole(paths[1], latex(table).encode())
    write_csv(paths[2], rows(table))
    return paths


def rows(table: Comparison) -> list[dict[str, Any]]:
    """Return the table with one row for each mean."""
    leads = {(lead.group, lead.method, lead.cell.name): lead for lead in table.leads}
    listed = []
    for key, entry in table.entries.items():
        lead = leads.get(key)
        tested = lead.difference if lead else None
        listed.append(
            {
                "clients": entry.group,
                "method": entry.method,
                "data": entry.cell.data,
                "num_clients": entry.cell.clients,
                "rounds": table.rounds,
                "seeds": entry.seeds,
                "mean": digits(entry.mean, 2),
                "std": digits(entry.std, 2),
                "best": int(entry.best),
                "paper_mean": digits(entry.paper[0] if entry.paper else None, 1),
                "paper_std": digits(entry.paper[1] if entry.paper else None, 1),
                "best_baseline": lead.baseline if lead else "",
                "lead": digits(tested.points if tested else lead.points if lead else None, 2),
                "lead_low": digits(tested.low if tested else None, 2),
                "lead_high": digits(tested.high if tested else None, 2),
                "p": digits(tested.p if tested else None, 4),
                "lead_seeds": tested.seeds if tested else "",
                "lead_clients": tested.clients if tested else "",
            }
        )
    return listed


def digits(value: float | None, places: int) -> str:
    """Return a number with `places` decimal places; "" for None."""
    return "" if value is None else f"{value:.{places}f}"


def markdown(table: Comparison) -> str:
    """Return the table in Markdown."""
    lines = [
        "# Table 1: test accuracy in %",
        "",
        f"Share of correct predictions over all test samples of a group of clients, after {table.rounds} rounds "
        "(Local: no rounds), at the round with the best validation accuracy on seen clients. Mean ± standard "
        "deviation over seeds; the paper's in brackets. The best of our means in each column is bold. The columns of "
        "writers use our own data: the paper's FEMNIST has 3,597 writers, not 328, so its figures are not shown.",
    ]
    for group, heading in _HEADINGS.items():
        lines += ["", f"## {heading}", ""]
        lines.append("| | " + " | ".join(cell.title for cell in table.cells) + " |")
        lines.append("| --- |" + " --- |" * len(table.cells))
        lines.append("| *seeds* | " + " | ".join(str(seeds) for seeds in _seeds(table)) + " |")
        for method, title in TITLES.items():
            cells = [entry_markdown(table.entries[group, method, cell.name]) for cell in table.cells]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "## Ahead of the best baseline", ""]
    if table.leads:
        lines += [
            "Percentage points, with the 95% interval of a paired bootstrap over the clients of each seed (10,000 "
            "resamples). The interval does not cover the randomness of training.",
            "",
            *_lead_rows(table.leads),
        ]
    else:
        lines.append("No baseline has results yet.")
    if table.more:
        lines += ["", "## With more seeds", "", *_more_seeds(table)]
    return "\n".join(lines) + "\n"


def _searches(table: Comparison, tuned: Path) -> str:
    """Return the part of the page about searches in Markdown; "" without any."""
    if not tuned.is_dir():
        return ""
    methods = {row.method: TITLES[row.method] for row in ROWS}
    lines = [
        "",
        "## Settings that were tried",
        "",
        "Number of different settings in `results/tune`, and of training runs if some settings were tried with several "
        "seeds. A column without a search uses the best settings of the same data with the nearest number of clients.",
        "",
        *searched_lines(methods, table.cells, tuned),
    ]
    return "\n".join(lines) + "\n"


def _seeds(table: Comparison) -> list[int]:
    """Return the number of seeds of each column."""
    method = next(iter(TITLES))
    return [table.entries[GROUPS[0], method, cell.name].wanted for cell in table.cells]


def _more_seeds(table: Comparison) -> list[str]:
    lines = [
        "The columns above have the same seeds for all methods, or fewer where stated. These methods have more seeds, "
        "and all of them count here. A lead uses the seeds that both methods have. It is given only if the best "
        "baseline of the column is in this table.",
        "",
        "| | method | seeds | seen | unseen |",
        "| --- | --- | --- | --- | --- |",
    ]
    for cell in table.cells:
        for method, title in TITLES.items():
            both = [entry for group in GROUPS if (entry := table.more.get((group, method, cell.name)))]
            if both:
                shown = " | ".join(entry_markdown(entry) for entry in both)
                lines.append(f"| {cell.title} | {title} | {both[0].seeds} | {shown} |")
    return [*lines, "", *_lead_rows(table.more_leads)] if table.more_leads else lines


def _lead_rows(leads: Sequence[Lead]) -> list[str]:
    return [
        "| clients | | method | best baseline | ahead by | 95% interval | p | clients | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_lead_row, leads),
    ]


def _lead_row(lead: Lead) -> str:
    cells = [lead.group, lead.cell.title, TITLES[lead.method], TITLES[lead.baseline]]
    d = lead.difference
    if d is None:
        cells += [f"{lead.points:+.1f}", "not tested: no counts for the same clients", "", "", ""]
    else:
        p = "< 0.001" if d.p < 0.001 else f"{d.p:.3f}"
        cells += [f"{d.points:+.1f}", f"{d.low:+.1f} to {d.high:+.1f}", p, str(d.clients), str(d.seeds)]
    return "| " + " | ".join(cells) + " |"


def entry_markdown(entry: Entry) -> str:
    """Return our mean in Markdown, bold if it is the best, with the paper's mean in brackets."""
    return _cell(entry, lambda text: f"**{text}**", "±")


def _cell(entry: Entry, bold: Callable[[str], str], plus_minus: str) -> str:
    """Return our mean as text, bold if it is the best, with the paper's mean in brackets."""
    ours = MISSING
    if entry.mean is not None:
        ours = f"{entry.mean:.1f}" + ("" if entry.std is None else f" {plus_minus} {entry.std:.1f}")
        ours = bold(ours) if entry.best else ours
        if entry.seeds < entry.wanted:
            ours += f" [{entry.seeds} of {entry.wanted} seeds]"
    return ours if entry.paper is None else f"{ours} ({entry.paper[0]:.1f} {plus_minus} {entry.paper[1]:.1f})"


def latex(table: Comparison) -> str:
    """Return the table in LaTeX, which needs no packages."""
    lines = [
        "% Made by `pefll reproduce table1 --tables-only`; the paper's numbers are in brackets.",
        f"\\begin{{tabular}}{{l{'c' * len(table.cells)}}}",
    ]
    for group, heading in _HEADINGS.items():
        lines += ["\\hline", f"\\multicolumn{{{len(table.cells) + 1}}}{{l}}{{\\textit{{{heading}}}}} \\\\", "\\hline"]
        lines.append(" & " + " & ".join(cell.title.replace("n=", "$n=$") for cell in table.cells) + " \\\\")
        lines.append("seeds & " + " & ".join(str(seeds) for seeds in _seeds(table)) + " \\\\")
        lines.append("\\hline")
        for method, title in TITLES.items():
            cells = [_latex_cell(table.entries[group, method, cell.name]) for cell in table.cells]
            lines.append(f"{title} & " + " & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\hline", "\\end{tabular}"]) + "\n"


def _latex_cell(entry: Entry) -> str:
    return _cell(entry, lambda text: f"\\textbf{{{text}}}", "$\\pm$").replace(MISSING, "---")
