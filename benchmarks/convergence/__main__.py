"""Measures Theorem 3.1: python -m benchmarks.convergence --out results/convergence.json.

It trains PeFLL on a problem whose constants are known, and varies T, c, k and b one at a time. It writes the measured
means of ‖∇F‖² and the theorem's terms as JSON, a page with the slopes (.md) and a figure (.png). It is no experiment of
`pefll reproduce`, because these are made of runs on data sets: accuracies of run folders, one per row and seed.
"""

from __future__ import annotations

import argparse
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.convergence.page import draw, markdown
from benchmarks.convergence.problem import BALL, Eta, Problem, constants, described, make_problem, start
from benchmarks.convergence.simulation import CHUNK, Setting, floor_of, simulate
from benchmarks.convergence.slopes import log_slope, mean_estimate, slope_estimate
from pefll.core.files import make_folder, write_json
from pefll.core.progress import Monitor, monitor
from pefll.engines.hardware import processor
from pefll.guarantees.convergence import (
    Constants,
    least_rounds,
    least_rounds_of_the_paper,
    printed_terms,
    sharper_terms,
    terms,
)
from pefll.training.summary import commit

ROUNDS = (3_000, 6_000, 12_000, 30_000, 60_000, 120_000, 300_000)
CLIENTS, STEPS, BATCHES = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)
MIDDLE = Setting(rounds=50_000, clients=4, steps=4)
LONG = Setting(rounds=100_000, clients=4, steps=4)


class Wanted(NamedTuple):
    """One measurement: what is varied in it, and whether local gradients have noise."""

    sweep: str
    setting: Setting
    noisy: bool = True


def plan(fewer: int = 1) -> list[Wanted]:
    """Return all measurements. `fewer` divides the numbers of rounds, for a quick look."""
    found = [Wanted("rounds", MIDDLE._replace(rounds=rounds)) for rounds in ROUNDS]
    found += [Wanted("clients", MIDDLE._replace(clients=clients)) for clients in CLIENTS]
    for steps in STEPS:
        found += [Wanted("steps", MIDDLE._replace(steps=steps), noisy) for noisy in (True, False)]
    found += [Wanted("batch", LONG._replace(batch=batch)) for batch in (*BATCHES, 0)]
    return [each._replace(setting=each.setting._replace(rounds=each.setting.rounds // fewer)) for each in found]


class Shared(Monitor):
    """Shows the rounds of one measurement as a part of all rounds."""

    def __init__(self, watch: Monitor, before: int) -> None:
        self._watch, self._before = watch, before

    def at(self, done: int, news: str = "") -> None:
        """Show the number of finished rounds of this measurement."""
        self._watch.at(self._before + done, news)


def measure(
    problem: Problem, initial: Eta, known: Constants, wanted: Wanted, repetitions: int, seed: int, watch: Monitor
) -> dict[str, Any]:
    """Return one row: the setting, the repetitions' mean squared gradients, and the theorem's terms."""
    used = problem if wanted.noisy else problem._replace(noise=0.0)
    found = simulate(used, initial, wanted.setting, repetitions, seed, watch)
    own = known if wanted.noisy else known._replace(sigma1=0.0)
    setting = wanted.setting
    numbers = setting.rounds, setting.clients, setting.steps, setting.batch or np.inf
    holds = setting.rounds >= least_rounds(own, setting.clients)
    return {
        "sweep": wanted.sweep,
        **setting._asdict(),
        "noisy": wanted.noisy,
        "mean": mean_estimate(found.gradient)._asdict(),
        "repetitions": [float(f"{value:.6g}") for value in found.gradient],
        "reach": found.reach,
        "bound": terms(own, *numbers)._asdict() if holds else None,
        "sharper": sharper_terms(own, *numbers)._asdict() if holds else None,
        "printed": printed_terms(own, *numbers)._asdict(),
        "printed_needs_rounds": least_rounds_of_the_paper(own, setting.clients, setting.steps),
    }


def slopes(rows: list[dict[str, Any]], floors: dict[int, float], seed: int) -> dict[str, Any]:
    """Return each measured slope with its interval, and the bound's slope over the same points."""
    found: dict[str, Any] = {}

    def add(name: str, sweep: str, x: list[float], repetitions: list[Any], chosen: list[dict[str, Any]]) -> None:
        if all(np.mean(each) > 0 for each in repetitions):
            bounds = [sum(row["bound"].values()) for row in chosen if row["bound"]]
            of_bound = log_slope(x, bounds) if len(bounds) == len(x) else None
            found[name] = {"in": sweep, "at": x, **slope_estimate(x, repetitions, seed)._asdict(), "bound": of_bound}

    for sweep in ("rounds", "clients", "steps"):
        chosen = [row for row in rows if row["sweep"] == sweep and row["noisy"]]
        x = [float(row[sweep]) for row in chosen]
        add(sweep, sweep, x, [np.array(row["repetitions"]) for row in chosen], chosen)
    # The same random choices with and without noise: their difference is the noise's own part.
    pairs = {row["steps"]: [np.array(row["repetitions"])] for row in rows if row["sweep"] == "steps" and row["noisy"]}
    for row in rows:
        if row["sweep"] == "steps" and not row["noisy"]:
            pairs[row["steps"]].append(np.array(row["repetitions"]))
    add(
        "steps, part of the noise",
        "steps",
        [*map(float, pairs)],
        [noisy - quiet for noisy, quiet in pairs.values()],
        [],
    )
    whole = next(np.array(row["repetitions"]) for row in rows if row["sweep"] == "batch" and not row["batch"])
    excess = {row["batch"]: np.array(row["repetitions"]) - whole for row in rows if row["sweep"] == "batch"}
    # Only batches whose excess is clearly above 0: the others are lost in what repetitions differ.
    clear = {batch: each for batch, each in excess.items() if batch and mean_estimate(each).low > 0}
    if len(clear) > 1:
        add("batch, excess over all samples", "batch", [*map(float, clear)], [*clear.values()], [])
    limit = log_slope([*map(float, floors)], [*floors.values()])
    exact = {"value": limit, "low": limit, "high": limit, "bound": None}
    found["batch, floor of infinitely many rounds"] = {"in": "batch", "at": [*map(float, floors)]} | exact
    return found


def main() -> None:
    """Measure all settings, and write JSON, page and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/convergence.json"))
    parser.add_argument("--repetitions", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fewer", type=int, default=1, help="divide all numbers of rounds by this, for a quick look")
    given = parser.parse_args()
    problem, initial = make_problem(given.seed), start(given.seed)
    known = constants(problem, initial)
    wanted = plan(given.fewer)
    rows: list[dict[str, Any]] = []
    console, before = Console(stderr=True), 0
    with monitor(console, "rounds", sum(each.setting.rounds for each in wanted)) as watch:
        for each in wanted:
            part = Shared(watch, before)
            rows.append(measure(problem, initial, known, each, given.repetitions, given.seed, part))
            before += each.setting.rounds
            watch.at(before)
    floors = {batch: floor_of(problem, initial, batch) for batch in BATCHES}
    record = {
        "command": f"python -m benchmarks.convergence --repetitions {given.repetitions} --seed {given.seed}",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "platform": platform.platform(), "numpy": np.__version__},
        "constants": described(known),
        "ball": BALL,
        "reach": max(row["reach"] for row in rows),
        "slopes": slopes(rows, floors, given.seed),
        "floors": {str(batch): value for batch, value in floors.items()},
        "chunk": CHUNK,
        "rows": rows,
    }
    make_folder(given.out.parent)
    write_json(given.out, record)
    given.out.with_suffix(".md").write_text("\n".join(markdown(record)) + "\n")
    draw(record, given.out.with_suffix(".png"))
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
