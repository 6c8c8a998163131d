"""Prints a federation: clients, samples and classes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pefll.core.wording import counted, without_samples
from pefll.data.samples import SPLITS
from pefll.data.summary import Spread, Summary
from pefll.report.table import new_table

MOST_CLASSES = 20


def print_federation(summary: Summary, console: Console) -> None:
    """Print the clients of a federation, their samples per split, and their classes.

    If there are more than MOST_CLASSES classes, only the most and the least frequent ones are listed.
    """
    console.print(Text.assemble((summary.name, "bold"), f", {summary.partition}"))
    console.print(
        f"{counted(summary.num_clients, 'client')}: {summary.num_seen:,} seen, {summary.num_unseen:,} unseen; "
        + _label_words(summary),
        highlight=False,
    )
    if summary.num_untested:
        console.print(without_samples(summary.num_untested, summary.num_clients, "test"), highlight=False)
    console.print()
    console.print(_samples_table(summary))
    console.print()
    console.print(_range_table(summary) if summary.ranges else _class_table(summary))


def _label_words(summary: Summary) -> str:
    if summary.ranges:
        return f"labels are {counted(len(summary.ranges), 'number')}"
    if not summary.classes:
        return f"labels are sets of {len(summary.class_table)}"
    return f"{counted(summary.classes, 'class')}, {_spread(summary.classes_per_client)} per client"


def _range_table(summary: Summary) -> Table:
    table = new_table("Training labels")
    table.add_column("label", overflow="fold")
    for heading in ("least", "mean", "most"):
        table.add_column(heading, justify="right")
    for k, values in enumerate(summary.ranges):
        name = summary.class_names[k] if len(summary.class_names) == len(summary.ranges) else str(k)
        table.add_row(Text(name), *(f"{value:.4g}" for value in values))
    return table


def _samples_table(summary: Summary) -> Table:
    table = new_table("Samples")
    table.add_column("split")
    for heading in ("all clients", "least per client", "median", "most"):
        table.add_column(heading, justify="right")
    for split, total, each in zip(SPLITS, summary.samples, summary.samples_per_client, strict=True):
        table.add_row(split, f"{total:,}", f"{each.least:,}", _number(each.median), f"{each.most:,}")
    return table


def _class_table(summary: Summary) -> Table:
    table = new_table("Samples of each class")
    table.add_column("class", overflow="fold")
    for split in SPLITS:
        table.add_column(split, justify="right")
    table.add_column("share of train")
    train = [row[0] for row in summary.class_table]
    largest, total = max(1, *train), max(1, sum(train))
    for k in _listed(train):
        if k is None:
            table.add_row("…", *["…"] * len(SPLITS), "")
            continue
        name = summary.class_names[k] if len(summary.class_names) == len(summary.class_table) else str(k)
        bar = "█" * round(20 * train[k] / largest)
        counts = [f"{count:,}" for count in summary.class_table[k]]
        table.add_row(Text(name), *counts, f"{100 * train[k] / total:4.1f}% [cyan]{bar}[/]")
    return table


def _listed(train: list[int]) -> list[int | None]:
    """Return the classes to list; None stands for the omitted ones between most and least frequent."""
    if len(train) <= MOST_CLASSES:
        return list(range(len(train)))
    order = sorted(range(len(train)), key=lambda k: -train[k])
    half = MOST_CLASSES // 2
    return [*order[:half], None, *order[-half:]]


def _spread(spread: Spread) -> str:
    if spread.least == spread.most:
        return f"{spread.least:,}"
    return f"{spread.least:,} to {spread.most:,} (median {_number(spread.median)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
