"""Tables of metrics that commands print."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.markup import escape
from rich.table import Table

from pefll.runs.record import GROUPS, MEASURES, figure_text, figures_in, is_share


def accuracy_table(
    groups: dict[str, Any], title: str, measures: tuple[str, ...] = (), shares: Collection[str] = ()
) -> Table:
    """Return a table with a row for each group of clients and a column for each measure.

    Args:
        groups: the figures of each group by name.
        title: above the table.
        measures: by default accuracies and further metrics, or all metrics of another task.
        shares: the user's metrics that are shown in per cent.
    """
    known: dict[str, Any] = next((values for values in groups.values() if values), {})
    if not measures:
        classifies = not known or "per_sample" in known
        more = (name for name in known if name not in (*MEASURES, "loss"))
        measures = (*MEASURES, *more) if classifies else tuple(known)
    table = Table(
        "clients",
        *(escape(measure.replace("_", " ")) for measure in measures),
        title=escape(title),
        title_justify="left",
    )
    for name, values in groups.items():
        cells = ("—" if values is None else figure_text(values, measure, shares) for measure in measures)
        table.add_row(escape(name), *cells)
    return table


def best_table(summary: dict[str, Any]) -> Table:
    """Return the table of a summary's test metrics at the best round."""
    what = "Test accuracy" if "accuracy" in summary else "Test metrics"
    return accuracy_table(figures_in(summary)["best"], f"{what} at the best round", shares=summary.get("shares", ()))


def seeds_table(summaries: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each run's summary, and one for their mean ± standard deviation."""
    from pefll.report import mean_std_text

    groups = [group for one in summaries for group in figures_in(one)["best"].values() if group]
    first = next(iter(groups[0])) if groups else "per_sample"
    share = any(is_share(first, first, one.get("shares", ())) for one in summaries)
    what = "accuracy" if first == "per_sample" else first

    def text(values: list[float]) -> str:
        return mean_std_text(values, share) + ("%" if values and share else "")

    table = Table("seed", "best round", *GROUPS, title=f"Test {escape(what)} at the best round", title_justify="left")
    columns: dict[str, list[float]] = {group: [] for group in GROUPS}
    for one in summaries:
        cells = []
        for group, values in columns.items():
            score = figures_in(one)["best"][group]
            value = score[first] if score else None
            mine = [] if value is None else [100 * value if share else value]
            values += mine
            cells.append(text(mine))
        table.add_row(str(one["seed"]), str(one["best_round"]), *cells)
    table.add_row("mean", "", *map(text, columns.values()))
    return table
