"""Compares the speed of this working tree with that of an earlier commit.

Our engines run the settings of `make bench` twice: with the code of an earlier commit, and with the code of this
working tree. Both are processes that take turns, so that other work on the machine slows both. In each turn, the
seconds of this tree are divided by those of the earlier commit. The table has medians of these ratios: below 1 is
faster.

    python -m benchmarks.same_speed bd7a61a --quick --out results/same_speed.json
    python -m benchmarks.same_speed build/2ac15cd --group main --only vector      # on a GPU, without git: a folder
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.same_bits import ROOT, sha_of, tree_of
from benchmarks.speed.contender import Contender, contenders
from benchmarks.speed.plan import plan
from benchmarks.speed.race import Failed, Runner, spread
from benchmarks.speed.record import machine
from benchmarks.speed.setting import Setting
from pefll.core.files import write_json

Seconds = list[tuple[float, float]]  # (wall-clock seconds, processor seconds) of each turn


def compare(contender: Contender, setting: Setting, earlier: Path, turns: int, turn_seconds: float) -> dict[str, Any]:
    """Let both trees take turns and return the ratios of their seconds.

    Args:
        contender: one of our engines.
        setting: setting of the race.
        earlier: folder with the checkout of the earlier commit.
        turns: number of timed turns of each tree.
        turn_seconds: time of a turn; it has as many rounds as the earlier commit does in this time.
    """
    runners = [Runner(contender, setting, None, root) for root in (earlier, ROOT)]
    try:
        for runner in runners:
            runner.turn(1)  # compiles, and fills caches
        rounds = max(1, math.ceil(turn_seconds / max(runners[0].turn(1)["seconds"], 1e-6)))
        runners[1].turn(1)
        taken: list[Seconds] = [[], []]
        for turn in range(turns):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                took = runners[which].turn(rounds)
                taken[which].append((took["seconds"], max(took["cpu_seconds"], 0.01)))
    finally:
        for runner in runners:
            runner.close()
    by_clock, of_processor = ([after[k] / before[k] for before, after in zip(*taken, strict=True)] for k in (0, 1))
    return {
        "contender": contender.name,
        "setting": setting.plain(),
        "rounds_per_turn": rounds,
        "seconds": taken,
        "by_clock": spread(by_clock),
        "of_processor": spread(of_processor),
    }


@contextmanager
def earlier_tree(commit: str) -> Iterator[Path]:
    """Return the folder of the earlier code: a given folder, or a checkout that is removed at the end."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory() as folder, tree_of(commit, Path(folder)) as tree:
        yield tree


def cases(quick: bool, only: str, cuda: bool, group: str = "") -> list[tuple[Contender, Setting]]:
    """Return our engines and their settings in the races of `make bench`."""
    everybody = contenders(2, cuda)
    return [
        (contender, race.setting)
        for race in plan(everybody, 2, cuda, quick)
        for contender in race.contenders
        if contender.module == "ours"
        and group in ("", race.group)
        and only in f"{contender.name} {race.setting.model} {race.setting.cohort}"
        and (contender.device == "cuda") == cuda
    ]


def main() -> None:
    """Compare, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit, or a folder with its code")
    parser.add_argument("--quick", action="store_true", help="the settings of `make bench ARGS=--quick`")
    parser.add_argument("--group", default="", help="the settings of one group, such as main [all]")
    parser.add_argument("--only", default="", help="a part of 'engine model clients', such as 'serial-1 lenet 4'")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    chosen = cases(options.quick, options.only, torch.cuda.is_available(), options.group)
    with earlier_tree(options.commit) as tree, Progress(console=Console(stderr=True)) as bar:
        step, rows = advance(bar, len(chosen)), []
        for contender, setting in chosen:
            try:
                rows.append(step(compare(contender, setting, tree, options.turns, options.turn_seconds)))
            except Failed as error:  # the earlier commit may not know a model of today
                bar.console.print(f"left out: {contender.name} with {setting.model}: {error}")
    table = Table("engine", "model", "clients per round", "by the clock", "processor", title="seconds, now / earlier")
    for row in rows:
        figures = (f"{row[kind]['median']:.3f}" for kind in ("by_clock", "of_processor"))
        table.add_row(row["contender"], row["setting"]["model"], str(row["setting"]["cohort"]), *figures)
    Console().print(table)
    if options.out:
        command = "python -m benchmarks.same_speed " + " ".join(sys.argv[1:])
        earlier = Path(options.commit).name if Path(options.commit).is_dir() else sha_of(options.commit)
        commits = [earlier, os.environ.get("PEFLL_COMMIT") or sha_of("HEAD")]
        write_json(options.out, {"command": command, "commits": commits, "machine": machine(), "rows": rows})


def advance(bar: Progress, total: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that advances a progress bar and returns its argument."""
    task = bar.add_task("engines", total=total)

    def step(row: dict[str, Any]) -> dict[str, Any]:
        bar.advance(task)
        return row

    return step


if __name__ == "__main__":
    main()
