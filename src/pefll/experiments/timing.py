"""How long runs of the table will take on a GPU, reckoned from runs that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.files import read_json
from pefll.experiments import table1
from pefll.experiments.results import Result
from pefll.experiments.table1 import Cell, Job
from pefll.methods import METHODS, build_method, hyperparameters
from pefll.methods.contract import Method, Problem
from pefll.models import Network, build_model

# Client steps of LeNet (32 samples) in a second, by how many clients train at once, where no result tells: some two
# thirds of what PeFLL does on an H200 (results/lockstep.json).
GUESSES = {5: 23_000.0, 50: 57_000.0}
# Where all training happens when clients are personalised, and no result tells: a guess from before a step of such a
# training was recorded.
UNRECORDED = 10_000.0


class Speed(NamedTuple):
    """How fast a run was.

    Attributes:
        method: its name.
        cell: the name of its federation, as a cell's.
        width: how many clients trained at once.
        model: what they ran.
        recorded: whether it had rounds, which a GPU records.
        rate: steps of all clients, in a second of the device; time that other runs took away is not counted.
    """

    method: str
    cell: str
    width: int
    model: str
    recorded: bool
    rate: float


class Estimate(NamedTuple):
    """Seconds of a device that a run takes, and the steps in a second that they are reckoned from, in words."""

    seconds: float
    basis: str


def estimate(job: Job, known: Sequence[Speed], rounds: int) -> Estimate:
    """Reckon how long a run takes on a GPU, from the run that is most like it.

    That is one of the same method with about as many clients at once; else of any method.

    Args:
        job: the run.
        known: how fast earlier runs were.
        rounds: of training.
    """
    steps, width = client_steps(job, rounds), _width(job.method, job.cell)
    recorded = has_rounds(job.method)
    alike = [one for one in known if one.model in (job.cell.model, "auto") and one.recorded == recorded]
    if not alike:
        guess = GUESSES[min(GUESSES, key=lambda at: abs(math.log(at / width)))] if recorded else UNRECORDED
        return Estimate(steps / guess, f"{guess:.0f}, a guess")
    # Of equals the fastest: the others shared their GPU with somebody, or ran before something was made faster.
    like = min(alike, key=lambda one: (*_distance(one, job, width), -one.rate))
    where = like.cell if like.method == job.method else f"{like.method} {like.cell}"
    return Estimate(steps / like.rate, f"{like.rate:.0f} in {where}")


def _distance(one: Speed, job: Job, width: int) -> tuple[bool, float]:
    """Return how little a run tells about a job: its method counts most, then how many clients trained at once."""
    return one.method != job.method, round(abs(math.log(one.width / width)), 6)


def speeds(runs: Sequence[Result]) -> list[Speed]:
    """Return how fast runs on a GPU were: results, or trials of a tuning."""
    return [speed for one in runs if (speed := _speed(one)) is not None]


def read_trials(tuned: Path) -> list[Result]:
    """Return the trials in a folder of files that `pefll tune` wrote, each with what all of its file have in common."""
    trials = []
    for path in sorted(tuned.glob("*.json")):
        found = read_json(path)
        common = {"num_unseen": 0} | {key: value for key, value in found.items() if key not in ("best", "trials")}
        trials += [common | row for row in found.get("trials", []) if row["error"] is None]
    return trials


def _speed(one: Result) -> Speed | None:
    """Return a run's speed; None where it tells nothing about a GPU."""
    # Results without `lockstep` do not tell how many runs shared the device.
    if str(one.get("device", "cpu")).startswith("cpu") or "lockstep" not in one:
        return None
    steps = _steps_of(one)
    # Earlier results have no time by the clock; rounds and evaluations went on one after another then.
    spent = one.get("wall_seconds") or one["train_seconds"] + one["eval_seconds"]
    seconds = spent / one["lockstep"] + one.get("test_seconds", 0)
    if not steps or not seconds:
        return None
    recorded = one["rounds"] > 0
    return Speed(
        method=one["method"],
        cell=f"{one['dataset']}-{one['num_clients']}",
        width=one["clients_per_round"] if recorded else one["num_clients"],
        model=one["model"],
        recorded=recorded,
        rate=steps / seconds,
    )


def _steps_of(one: Result) -> float:
    """Return the steps of all clients in a run; 0 where that is not known."""
    if one["rounds"]:
        return float(one["rounds"] * one["clients_per_round"] * one.get("local_steps", 0))
    cells = [cell for cell in table1.CELLS if (cell.data, cell.clients) == (one["dataset"], one["num_clients"])]
    if not cells or one["method"] not in METHODS:
        return 0.0
    # Runs that choose hyper-parameters train no unseen clients.
    share = (one["num_seen"] + one["num_unseen"]) / one["num_clients"]
    return float(share) * client_steps(Job(one["method"], cells[0], one["seed"], one["settings"], ""), 0)


def client_steps(job: Job, rounds: int) -> float:
    """Return how many gradients of a batch all clients compute together in a run."""
    method = _like(job.method, job.cell.model, tuple(sorted(job.settings.items())))
    per_epoch = math.ceil(job.cell.train_samples / job.cell.clients / (method.batch_size or 32))
    if not method.trains_in_rounds:
        epochs = (hyperparameters(job.method) | job.settings).get("epochs", 1)
        return float(job.cell.clients * epochs * per_epoch)
    return float(rounds * job.cell.cohort * (method.local_epochs * per_epoch or method.local_steps))


@cache
def _like(name: str, model: str, settings: tuple[tuple[str, Any], ...]) -> Method[Any]:
    """Return a method with the settings of a job, on some problem; its counts of steps are the same on any."""
    shape = (3, 32, 32)
    return build_method(name, Problem(Network(build_model(model, shape, 10)), shape, 10, 100), dict(settings))


def has_rounds(method: str) -> bool:
    """Whether a method learns anything in rounds."""
    return getattr(METHODS[method], "trains_in_rounds", True) is not False


def _width(method: str, cell: Cell) -> int:
    """Return how many clients train at once: where there are no rounds, all of them."""
    return cell.cohort if has_rounds(method) else cell.clients
