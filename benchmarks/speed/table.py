"""Makes tables from a record: in the terminal, in Markdown, and in docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.speed.plan import GROUPS, OWN_CNN
from benchmarks.speed.race import RATES, REFERENCES, Row
from pefll.core.errors import PefllError
from pefll.core.files import write_whole

# The number that grows in a group of races, and its letter.
AXES = {"cohort": "c", "steps": "k", "batch": "batch", "clients": "n"}
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
METHOD = (
    "Client steps per second and per CPU-second are medians over the turns, ± half of the range. × plain and × "
    "pfl are medians of ratios to the plain loop and to pfl-research, on the same device in the same turn. On a "
    'busy machine, only these ratios are reliable. "Hardly any" means less than 0.2 s of CPU time per turn.'
)


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn.

    Attributes:
        title: title in one line.
        source: commits of the measured code, and versions of other simulators that took part.
        header: titles of the columns.
        rows: cells of each row; the first is a name, the others are numbers.
    """

    title: str
    source: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(races: Sequence[dict[str, Any]]) -> Iterator[Sheet]:
    """Yield the tables of a record, in the order of GROUPS."""
    for group in GROUPS:
        entries = [entry for entry in races if entry["group"] == group]
        if group not in AXES:
            for entry in entries:
                yield _comparison(entry)
            continue
        families: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            fixed = {name: value for name, value in entry["setting"].items() if name != group}
            families.setdefault(str(fixed), []).append(entry)
        for family in families.values():
            yield _growth(group, family)


def describe(setting: dict[str, Any], without: str = "") -> str:
    """Return a setting in words, without the number that grows."""
    parts = {
        "model": {OWN_CNN: "a user's own network"}.get(setting["model"], setting["model"]),
        "clients": f"n = {setting['clients']:,}",
        "cohort": f"c = {setting['cohort']}",
        "steps": f"k = {setting['steps']}",
        "batch": f"batch {setting['batch']}",
    }
    return ", ".join(text for name, text in parts.items() if name != without)


def _comparison(entry: dict[str, Any]) -> Sheet:
    measured = [row for row in entry["rows"] if "error" not in row]
    gpu = any(row["device"] == "cuda" for row in entry["rows"])
    beside = [name for name in REFERENCES if any(name in row["over"] for row in measured)]
    header = ["", *_columns("steps/s", beside), *_columns("steps/CPU-s", beside), "memory", *["GPU memory"][:gpu]]
    rows = []
    for row in entry["rows"]:
        cells = [f"{row['label']} ({row['error']})" if "error" in row else row["label"]]
        if "error" not in row:
            for rate in RATES:
                cells += [_rate(row, rate), *(_ratio(row, name, rate) for name in beside)]
            cells += [_bytes(row["peak_bytes"]), *[_bytes(row["gpu_peak_bytes"])][:gpu]]
        rows.append((*cells, *[""] * (len(header) - len(cells))))
    return Sheet(describe(entry["setting"]), _source([entry]), tuple(header), tuple(rows))


def _source(entries: Sequence[dict[str, Any]]) -> str:
    commits = sorted({entry["commit"] for entry in entries if entry["commit"]})
    peers = {
        f"{name} {version}"
        for entry in entries
        for name, version in entry["peers"].items()
        # Installed software did not necessarily take part.
        if any(
            row["contender"].startswith({"flwr": "flower", "ray": "flower"}.get(name, name)) for row in entry["rows"]
        )
    }
    return "; ".join(filter(None, (f"commit {', '.join(commits)}" if commits else "", ", ".join(sorted(peers)))))


def _columns(rate: str, beside: Sequence[str]) -> list[str]:
    return [rate, *(f"× {name}" for name in beside)]


def _growth(group: str, family: Sequence[dict[str, Any]]) -> Sheet:
    by_value = {entry["setting"][group]: {row["contender"]: row for row in entry["rows"]} for entry in family}
    values = sorted(by_value)
    labels = {name: row["label"] for value in values for name, row in by_value[value].items()}
    rows = []
    for name, label in labels.items():
        cells = []
        for value in values:
            row = by_value[value].get(name)
            if row is None or "error" in row:
                cells.append("" if row is None else row["error"])
            else:
                # Each column is a separate race, so only ratios can be compared between columns.
                ratio = _ratio(row, "plain", "steps_per_second")
                rate = number(row["steps_per_second"]["median"])
                cells.append(f"{ratio}× ({rate})" if ratio else f"({rate})")
        rows.append((label, *cells))
    header = ("× plain (steps/s)", *(f"{AXES[group]} = {value:,}" for value in values))
    return Sheet(f"{GROUPS[group]}: {describe(family[0]['setting'], group)}", _source(family), header, tuple(rows))


def number(value: float) -> str:
    """Return a rate with its significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def known(row: Row, rate: str) -> bool:
    """Return whether turns used enough CPU time for its clock, which ticks a hundred times a second."""
    return rate != "steps_per_cpu_second" or min(turn["cpu_seconds"] for turn in row["turns"]) >= 0.2


def _rate(row: Row, name: str) -> str:
    if not known(row, name):
        return "hardly any"
    rate = row[name]
    return f"{number(rate['median'])} ±{50 * (rate['most'] - rate['least']) / rate['median']:.0f}%"


def _ratio(row: Row, reference: str, rate: str) -> str:
    if reference not in row["over"] or not known(row, rate):
        return ""
    ratio = row["over"][reference][rate]["median"]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count else ""


def markdown(record: dict[str, Any]) -> str:
    """Return a machine's tables as Markdown."""
    facts = record["machine"]
    place = f"{facts['gpu']}, " if facts["gpu"] else ""
    lines = [
        f"{place}{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, torch {facts['torch']}.",
        "",
        METHOD,
    ]
    for sheet in sheets(record["races"]):
        lines += [
            "",
            f"**{sheet.title}**" + (f" ({sheet.source})" if sheet.source else ""),
            "",
            _line(sheet.header),
            _line(["---", *["---:"] * (len(sheet.header) - 1)]),
        ]
        lines += [_line(row) for row in sheet.rows]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def draw(races: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the tables."""
    for sheet in sheets(races):
        table = Table(title=sheet.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for place, name in enumerate(sheet.header):
            table.add_column(name, justify="right" if place else "left", no_wrap=place > 0)
        for row in sheet.rows:
            table.add_row(*map(Text, row))  # as plain text: in markup, [bench] would be a style
        console.print(table)


def write_docs(document: Path, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Write the tables of all machines between the lines BEGIN and END of a document.

    Args:
        document: a Markdown file with the lines BEGIN and END.
        records: (name, content) of each machine.
    """
    try:
        text = document.read_text()
    except OSError as error:
        raise PefllError(f"cannot read {document}: {error.strerror}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise PefllError(f"{document} has no lines {BEGIN} and {END} to write the tables between")
    if not records:
        raise PefllError("there are no records to write; run `make bench` first")
    parts = []
    for name, record in records:
        title = record["machine"]["gpu"] or f"{record['machine']['cpu']}, {record['machine']['cores']} cores"
        picture = document.parent.parent / "results" / "speed" / f"{name}.png"
        drawn = f"![{title}](../results/speed/{name}.png)\n\n" if picture.exists() else ""
        parts.append(f"### {title}\n\n{drawn}{markdown(record)}")
    write_whole(document, f"{before}{BEGIN}\n\n{chr(10).join(parts)}\n{END}{after}".encode())
