"""Prints a federation: clients, samples and labels."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pefll.core.wording import counted, without_samples
from pefll.data.samples import SPLITS
from pefll.data.summary import Spread, Summary
from pefll.report.table import new_table

MOST_CLASSES = 20


def print_federation(summary: Summary, console: Console) -> None:
    """Print the clients of a federation, their samples per split, and their labels.

    If there are more than MOST_CLASSES classes, or members of sets, only the most and the least frequent are listed.
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
    if not summary.ranges:
        console.print(_class_table(summary))
        return
    console.print(_range_table("Training labels", ("least", "mean", "most"), summary.ranges, summary))
    if summary.client_means:
        console.print()
        title = "Means of clients"
        console.print(_range_table(title, ("least", "median", "most"), summary.client_means, summary))


def _label_words(summary: Summary) -> str:
    if summary.ranges:
        return f"labels are {counted(len(summary.ranges), 'number')}"
    if not summary.classes:
        members = sum(row[0] for row in summary.class_table) / max(1, summary.samples[0])
        return f"labels are sets of {len(summary.class_table)}, with {members:.2g} members on average"
    return f"{counted(summary.classes, 'class')}, {_spread(summary.classes_per_client)} per client"


def _range_table(title: str, headings: Sequence[str], ranges: Sequence[Sequence[float]], summary: Summary) -> Table:
    """Return a table with three figures for each column of numbers."""
    table = new_table(title)
    table.add_column("label", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    for k, values in enumerate(ranges):
        name = summary.class_names[k] if len(summary.class_names) == len(ranges) else str(k)
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
    sets = not summary.classes
    table = new_table("Samples with each label" if sets else "Samples of each class")
    table.add_column("label" if sets else "class", overflow="fold")
    for split in SPLITS:
        table.add_column(split, justify="right")
    table.add_column("share of train")
    train = [row[0] for row in summary.class_table]
    # A sample has one class, but any number of members of a set.
    largest, total = max(1, *train), max(1, summary.samples[0] if sets else sum(train))
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
