"""Estimates of the GPU time of runs, based on the speed of earlier runs."""

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

# Without earlier runs: client steps per second of a model (32 samples), by the number of clients that train at once.
# LeNet's are about two thirds of PeFLL's speed on an H200 (results/lockstep.json), and serve all other models, too.
GUESSES = {
    "lenet": {5: 23_000.0, 50: 57_000.0},
    "resnet20": {5: 2_400.0, 25: 4_500.0, 50: 6_000.0},
    "lstm": {5: 1_500.0, 50: 6_000.0},
}
# Without earlier runs: client steps per second of methods without rounds. An old guess, from before such training was
# captured in CUDA graphs.
GUESS_WITHOUT_ROUNDS = 10_000.0
EVALUATION_SECONDS = 6.0  # of a trained run with steps on the device; a guess


class Speed(NamedTuple):
    """The speed of a run.

    Attributes:
        method: name of the method.
        cell: name of the cell.
        width: number of clients that trained at once.
        model: name of the clients' model.
        in_rounds: whether the method trained in rounds.
        rate: steps of all clients per device second; the time that other runs took on the device is not counted.
    """

    method: str
    cell: str
    width: int
    model: str
    in_rounds: bool
    rate: float


class Estimate(NamedTuple):
    """Estimated device seconds of a run, and a text with the steps per second behind the estimate."""

    seconds: float
    basis: str


def estimate(job: Job, known: Sequence[Speed], rounds: int) -> Estimate:
    """Estimate the time of a run on a GPU from the most similar earlier run.

    The most similar run has the same method, if there is one, and the nearest number of clients that train at once.

    Args:
        job: the run.
        known: speeds of earlier runs.
        rounds: number of training rounds.
    """
    steps, width = client_steps(job, rounds), _width(job.method, job.cell)
    in_rounds = has_rounds(job.method)
    alike = [one for one in known if one.model == job.cell.model and one.in_rounds == in_rounds]
    if not alike:
        rates = GUESSES.get(job.cell.model, GUESSES["lenet"])
        guess = rates[min(rates, key=lambda at: abs(math.log(at / width)))] if in_rounds else GUESS_WITHOUT_ROUNDS
        return Estimate(steps / guess, f"{guess:.0f}, a guess")
    # Use the fastest of equally similar runs: the others shared their GPU, or used an older version of this package.
    like = min(alike, key=lambda one: (*_distance(one, job, width), -one.rate))
    where = like.cell if like.method == job.method else f"{like.method} {like.cell}"
    return Estimate(steps / like.rate, f"{like.rate:.0f} in {where}")


def _distance(one: Speed, job: Job, width: int) -> tuple[bool, float]:
    """Return how much a run differs from a job: first by method, then by the number of clients that train at once."""
    return one.method != job.method, round(abs(math.log(one.width / width)), 6)


def speeds(runs: Sequence[Result]) -> list[Speed]:
    """Return the speeds of runs on a GPU, given as results or as trials of `pefll tune`."""
    return [speed for one in runs if (speed := _speed(one)) is not None]


def read_trials(tuned: Path) -> list[Result]:
    """Return all trials in a folder of `pefll tune`, each merged with the protocol of its file."""
    trials = []
    for path in sorted(tuned.glob("*.json")):
        found = read_json(path)
        common = {"num_unseen": 0} | {key: value for key, value in found.items() if key not in ("best", "trials")}
        trials += [common | row for row in found.get("trials", []) if row["error"] is None]
    return trials


def _speed(one: Result) -> Speed | None:
    """Return a run's speed; None if it ran on a CPU or its speed is unknown."""
    # Without `lockstep`, it is unknown how many runs shared the device. Another evaluation of a run trains nothing.
    if str(one.get("device", "cpu")).startswith("cpu") or "lockstep" not in one or "evaluation" in one:
        return None
    steps = _steps_of(one)
    seconds = gpu_seconds(one)
    if not steps or not seconds:
        return None
    in_rounds = one["rounds"] > 0
    return Speed(
        method=one["method"],
        cell=f"{one['dataset']}-{one['num_clients']}",
        width=one["clients_per_round"] if in_rounds else one["num_clients"],
        model="lenet" if one["model"] == "auto" else one["model"],  # older results have the name that was asked for
        in_rounds=in_rounds,
        rate=steps / seconds,
    )


def gpu_seconds(one: Result) -> float:
    """Return a run's share of a GPU's time, including its test; 0 for a run on a CPU.

    Args:
        one: a result, or a trial of `pefll tune`. For another evaluation of a trained run, only the test counts.
    """
    if str(one.get("device", "cpu")).startswith("cpu"):
        return 0.0
    test: float = one.get("test_seconds", 0)
    if "evaluation" in one:
        return test
    # Older results lack `wall_seconds`. In these runs, rounds and evaluations did not overlap, so the sum is correct.
    spent = float(one.get("wall_seconds") or one["train_seconds"] + one["eval_seconds"])
    return spent / int(one.get("lockstep", 1)) + test


def _steps_of(one: Result) -> float:
    """Return the number of steps of all clients in a run; 0 if unknown."""
    if one["rounds"]:
        return float(one["rounds"] * one["clients_per_round"] * one.get("local_steps", 0))
    cells = [cell for cell in table1.CELLS if (cell.data, cell.clients) == (one["dataset"], one["num_clients"])]
    if not cells or one["method"] not in METHODS:
        return 0.0
    # Runs of `pefll tune` train no unseen clients.
    share = (one["num_seen"] + one["num_unseen"]) / one["num_clients"]
    return float(share) * client_steps(Job(one["method"], cells[0], one["seed"], one["settings"], ""), 0)


def client_steps(job: Job, rounds: int) -> float:
    """Return the number of batch gradients that all clients compute in a run."""
    method = _like(job.method, job.cell.model, tuple(sorted(job.settings.items())))
    per_epoch = math.ceil(job.cell.train_samples / job.cell.clients / (method.batch_size or 32))
    if not method.trains_in_rounds:
        epochs = (hyperparameters(job.method) | job.settings).get("epochs", 1)
        return float(job.cell.clients * epochs * per_epoch)
    return float(rounds * job.cell.cohort * (method.local_epochs * per_epoch or method.local_steps))


@cache
def _like(name: str, model: str, settings: tuple[tuple[str, Any], ...]) -> Method[Any]:
    """Return a method with a job's settings for a made-up problem; numbers of steps do not depend on the problem."""
    tokens = model == "lstm"
    shape = (80,) if tokens else (3, 32, 32)
    problem = Problem(Network(build_model(model, shape, 10)), shape, 10, 100, tokens=tokens)
    return build_method(name, problem, dict(settings))


def has_rounds(method: str) -> bool:
    """Return whether a method trains in rounds."""
    return getattr(METHODS[method], "trains_in_rounds", True) is not False


def _width(method: str, cell: Cell) -> int:
    """Return the number of clients that train at once: all clients if the method has no rounds."""
    return cell.cohort if has_rounds(method) else cell.clients
