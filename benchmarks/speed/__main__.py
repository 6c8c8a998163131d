"""`python -m benchmarks.speed`, which `make bench` calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.speed import plot, table
from benchmarks.speed.contender import contenders
from benchmarks.speed.plan import GROUPS, Race, plan
from benchmarks.speed.race import ROOT, race
from benchmarks.speed.record import Record, file_name, load, machine
from pefll.core.errors import PefllError, unknown
from pefll.core.files import sentences_for_disk_errors, write_whole
from pefll.engines.hardware import cores

MAIN_TURNS, OTHER_TURNS, TURN_SECONDS = 5, 3, 1.0
QUICK_TURNS, QUICK_SECONDS = 3, 0.3
PUBLISHED = ROOT / "results" / "speed"

EPILOG = f"""\
races (--only):
{chr(10).join(f"  {name:9} {about}" for name, about in GROUPS.items())}

Every contender of a race is a process of its own, started fresh and all there at once; they take turns, so that what
else the machine does meets all of them alike. The first round of each is not timed, and shows its memory. A client
step is one step of SGD of one client on one batch; a round's other costs (drawing, averaging, PeFLL's descriptors and
hypernetwork, a peer's messages) are in the time.

Finished races are kept: call it again, after Ctrl-C too, and only what is missing is measured. A race is missing where
the code of src/pefll or benchmarks/speed, the machine, the versions of Python and torch, or the turns have changed.

examples:
  python -m benchmarks.speed --quick                            a first look
  python -m benchmarks.speed --only main                        everybody, nothing else
  python -m benchmarks.speed --only cohort --among serial,plain two of them, growing with c
  pip install -e '.[bench]'                                     then pfl-research and Flower race too
  python -m benchmarks.speed --write-docs                       tables and pictures of all machines
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Measure our engines beside a plain PyTorch loop, torch.func.vmap, pfl-research and Flower.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, k = 10, shorter turns: about three minutes")
    parser.add_argument("--only", metavar="RACES", help="some races, with commas between them")
    parser.add_argument("--among", metavar="NAMES", help="some contenders (parts of names, commas); see --list")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the record")
    parser.add_argument(
        "--list", action="store_true", help="show races and contenders of this machine, measure nothing"
    )
    parser.add_argument("--out", type=Path, help="folder [build/speed; with --write-docs results/speed]")
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data", help="CIFAR-10, if it is there [data]")
    parser.add_argument("--turns", type=int, help=f"of each contender [{MAIN_TURNS}, {OTHER_TURNS} outside main]")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="measure nothing: tables and pictures of all records, docs/performance.md",
    )
    options = parser.parse_args(arguments)
    if options.turns is not None and options.turns < 1:
        parser.error("--turns must be at least 1")
    # Published figures change only with --write-docs.
    options.out = options.out or (PUBLISHED if options.write_docs else ROOT / "build" / "speed")
    return options


def chosen(races: Sequence[Race], only: str | None, among: str | None) -> list[Race]:
    """Return the chosen races; each keeps its plain loop, which ratios need.

    Args:
        races: all races.
        only: groups, separated by commas; None for all.
        among: parts of contenders' names, separated by commas; None for all.
    """
    groups = _words(only)
    for group in groups:
        if group not in GROUPS:
            raise unknown("race", group, GROUPS)
    parts = _words(among)
    names = {one.name for each in races for one in each.contenders}
    for part in parts:
        if not any(part in name for name in names):
            raise unknown("contender", part, names)

    kept = []
    for each in races:
        named = [one for one in each.contenders if not parts or any(part in one.name for part in parts)]
        references = {f"plain-{one.device}" for one in named}
        those = tuple(one for one in each.contenders if one in named or one.name in references)
        if those and (not groups or each.group in groups):
            kept.append(Race(each.group, each.setting, those))
    return kept


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def measure(races: Sequence[Race], record: Record, options: argparse.Namespace, console: Console) -> None:
    """Run the races that are not in the record."""

    def pace(each: Race) -> tuple[int, float]:
        if options.quick:
            return options.turns or QUICK_TURNS, QUICK_SECONDS
        return options.turns or (MAIN_TURNS if each.group == "main" else OTHER_TURNS), TURN_SECONDS

    todo = [each for each in races if not record.has(each, *pace(each))]
    if len(todo) < len(races):
        console.print(f"{len(races) - len(todo)} of {len(races)} races are in {record.path} already; --fresh for anew")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum((4 + pace(each)[0]) * len(each.contenders) for each in todo))
        for each in todo:

            def tick(name: str, each: Race = each) -> None:
                what = table.describe(each.setting.plain())
                progress.update(bar, description=f"{each.group} ({what}): {name}", advance=1)

            turns, seconds = pace(each)
            rows = race(each.setting, each.contenders, turns, seconds, options.data_dir, tick)
            record.add(each, turns, seconds, rows)


def show(path: Path, content: dict[str, Any], console: Console) -> None:
    """Write a record's tables and picture next to it: `path` with .md and .png."""
    write_whole(path.with_name(f"{path.name}.md"), table.markdown(content).encode())
    try:
        plot.draw(content["races"], path.with_name(f"{path.name}.png"))
    except PefllError as error:
        console.print(str(error), markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write them and the picture."""
    options = parse(arguments)
    console = Console(stderr=True)
    try:
        if options.write_docs:
            records = load(options.out)
            for name, content in records:  # after a stopped race there may be a record without tables
                show(options.out / name, content, console)
            table.write_docs(ROOT / "docs" / "performance.md", records)
            return 0
        cuda = torch.cuda.is_available()
        everybody = contenders(cores(), cuda)
        races = chosen(plan(everybody, cores(), cuda, options.quick), options.only, options.among)
        if options.list:
            for each in races:
                names = " ".join(f"{one.name}{' (not installed)' if one.missing else ''}" for one in each.contenders)
                print(f"{each.group}: {table.describe(each.setting.plain())}\n    {names}")
            return 0
        name = file_name(machine())
        with sentences_for_disk_errors(str(options.out)):
            options.out.mkdir(parents=True, exist_ok=True)  # fails before the races and not after them
        record = Record(options.out / f"{name}.json", fresh=options.fresh)
        measure(races, record, options, console)
        # A file or a pipe has no width.
        table.draw(record.races, Console(width=None if sys.stdout.isatty() else 120))
        show(options.out / name, {"machine": record.facts, "races": record.races}, console)
    except PefllError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; call it again and it goes on after the last finished race")
        return 130
    console.print(
        f"written: {options.out / name}.json, .md" + (", .png" if (options.out / f"{name}.png").exists() else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
