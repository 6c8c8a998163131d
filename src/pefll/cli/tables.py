"""Tables of accuracies that commands print."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pefll.runs.record import GROUPS, MEASURES


def accuracy_table(groups: dict[str, Any], title: str, measures: tuple[str, ...] = MEASURES) -> Table:
    """Return a table with a row for each group of clients and a column for each measure."""
    words = {"per_sample": "per sample", "per_client": "per client", "masked": "masked", "worst_tenth": "worst tenth"}
    table = Table("clients", *(words[measure] for measure in measures), title=title, title_justify="left")
    for name, values in groups.items():
        cells = ("—" if values is None else f"{100 * values[measure]:.1f}%" for measure in measures)
        table.add_row(name, *cells)
    return table


def seeds_table(summaries: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each run's summary, and one for their mean ± standard deviation."""
    from pefll.report import mean_std_text

    def per_cent(values: list[float]) -> str:
        return mean_std_text(values) + ("%" if values else "")

    table = Table("seed", "best round", *GROUPS, title="Test accuracy at the best round", title_justify="left")
    columns: dict[str, list[float]] = {group: [] for group in GROUPS}
    for one in summaries:
        cells = []
        for group, values in columns.items():
            score = one["accuracy"]["best"][group]
            mine = [100 * score["per_sample"]] if score else []
            values += mine
            cells.append(per_cent(mine))
        table.add_row(str(one["seed"]), str(one["best_round"]), *cells)
    table.add_row("mean", "", *map(per_cent, columns.values()))
    return table
