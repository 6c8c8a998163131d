"""How long a run on a CPU will take: tried out before the first round, and measured in the first rounds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted, either
from pefll.data.samples import TRAIN
from pefll.engines.cohort import Engine
from pefll.engines.serial import CLIENTS_AT_ONCE
from pefll.runs.progress import Progress
from pefll.training.pipeline import Stretch
from pefll.training.resolve import RunSpec

MEASURED_SECONDS = (
    3.0  # measure for this long, because the first rounds also start processes, and load and compile code
)
MEASURED_STRETCHES = 7  # and so many stretches, so that a few slow ones are not the median
LONG_SECONDS = 20.0  # stretches that took this long are measured well enough, however few
LEAST_SECONDS = 60.0  # no estimate for runs that end before
LEAST_ROUNDS = 5  # no trial for a run with fewer rounds, because the trial is a round itself
LONG_RUN_SECONDS = 180.0  # a run that takes longer on little data gets advice
LITTLE_DATA = 20_000  # most training samples that are little
WRONG = 1.5  # an estimate that is wrong by this factor is corrected

SHORT_SECONDS = 0.5  # trials that take less in all are repeated
TRIED_SECONDS = 3.0  # a trial that took this long is not repeated, although it also loaded and compiled code
# Client steps per second on one H200 in tf32, batches of 32, by the client model and the clients per round. They are
# rounded from docs/performance.md: PeFLL for LeNet, FedAvg for the others.
GPU_STEPS = {
    "lenet": {5: 36_000.0, 50: 100_000.0},
    "resnet20": {5: 3_300.0},
    "lstm": {5: 1_500.0, 50: 3_700.0},
}


class Estimate:
    """Estimates once how long the rest of a run takes.

    The first round is not measured. Of the other stretches of rounds the median counts, not the slow ones.

    Args:
        rounds: number of rounds of the run.
        runs_at_once: number of runs that take turns.
        told: seconds per round that a user was told already; 0 for none. Then only a large error is worth a sentence.
    """

    def __init__(self, rounds: int, runs_at_once: int = 1, told: float = 0.0) -> None:
        self._rounds, self._runs, self._before = rounds, runs_at_once, told
        self._began = self._told = False
        self._of_round: list[float] = []  # seconds per round of each measured stretch
        self._seconds = 0.0  # of all measured stretches

    def after(self, stretch: Stretch) -> str:
        """Return a sentence as soon as enough rounds are measured; "" before and afterwards."""
        if self._told:
            return ""
        if not self._began:  # the first stretch has one round
            self._began = True
            return ""
        seconds = stretch.rounds.seconds
        self._of_round.append(seconds / (stretch.last - stretch.first))
        self._seconds += seconds
        enough = self._seconds >= MEASURED_SECONDS and len(self._of_round) >= MEASURED_STRETCHES
        if not enough and self._seconds < LONG_SECONDS:
            return ""
        self._told = True
        of_round = median_low(self._of_round)
        if self._before / WRONG < of_round < self._before * WRONG:
            return ""
        left = of_round * (self._rounds - stretch.last) * self._runs
        shown = ", as the first ones show" if self._before else ""
        return f"the rounds take {about(left)} on this CPU{shown}" if left >= LEAST_SECONDS else ""


def about(seconds: float) -> str:
    """Return a rough time in words, such as `"about 12 minutes"` or `"about 2.6 hours"`."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if seconds < 55:
        return f"about {max(1, seconds):.0f} s"
    if minutes < 90:
        return "about a minute" if round(minutes) <= 1 else f"about {minutes:.0f} minutes"
    return f"about {hours:.1f} hours" if hours < 48 else f"about {days:.1f} days"


class Told(NamedTuple):
    """What a user is told before the first round.

    Attributes:
        sentence: how long the run takes; "" if it is short, or if its time is unknown.
        of_round: the seconds per round in the sentence; 0 without one.
    """

    sentence: str = ""
    of_round: float = 0.0


def before_first_round(engine: Engine, spec: RunSpec, progress: Progress, steps: float, runs: int = 1) -> Told:
    """Return how long a run takes on this CPU, and on a GPU if there is a figure for its model.

    It tries a round, or the training of some clients. The run's state and its counts of bytes stay as they are.

    Args:
        engine: runs the rounds. For a GPU, and for clients on other machines, nothing is tried.
        spec: the run's spec.
        progress: the run's progress.
        steps: steps of a client in a round, see `loop.local_steps`.
        runs: number of runs that take turns.
    """
    if engine.name not in ("serial", "vector") or engine.device.type != "cpu":
        return Told()
    rounds, clients = spec.config.rounds - progress.round, spec.clients_per_round
    in_rounds = spec.method.trains_in_rounds
    if in_rounds and rounds < LEAST_ROUNDS:
        return Told()
    kept = engine.ledger.copy()
    try:
        if not in_rounds:
            seconds = seconds_of_local_training(engine, progress.server)
        else:
            of_round = seconds_per_round(engine, progress.server, progress.round, clients)
            seconds = of_round * rounds
    except PefllError:  # the run has the same error, and says it with its round
        return Told()
    finally:
        vars(engine.ledger).update(vars(kept))
    if seconds * runs < LEAST_SECONDS:
        return Told()
    gpu = seconds_on_gpu(spec.model, spec.method.batch_size, rounds * clients * steps, clients) if in_rounds else 0.0
    doing = "the rounds take" if in_rounds else "training all clients takes"
    faster = f"; on a GPU (H200) {about(gpu * runs)}" if 0 < gpu < seconds else ""
    return Told(f"{doing} {about(seconds * runs)} on this CPU{faster}", of_round if in_rounds else 0.0)


def advice(told: Told, spec: RunSpec, runs: int, stops_early: bool) -> str:
    """Return how a long run on little data may be shorter, to follow what the user is told; "" if there is no need.

    Args:
        told: what the user is told.
        spec: the run's spec.
        runs: number of runs that take turns.
        stops_early: whether the run has early stopping.
    """
    federation, rounds = spec.federation, spec.config.rounds
    samples = int(federation.count[TRAIN, : federation.num_seen].sum())
    if told.of_round * rounds * runs < LONG_RUN_SECONDS or samples > LITTLE_DATA:
        return ""
    fewer = argument("rounds", max(1, rounds // 4))
    early = either("--early-stopping 10", "callbacks=[pefll.EarlyStopping()]")
    may_end = "" if stops_early else f", or end training when it does not improve with {early}"
    return f". For {counted(samples, 'training sample')}, fewer rounds may be enough: try {fewer}{may_end}"


def seconds_per_round(engine: Engine, server: Any, t: int, clients: int) -> float:
    """Return how long round t takes on this CPU, by a trial whose result is dropped.

    The serial engine first tries a few clients, which have about as many samples as the average client.
    """
    if engine.name == "vector":
        return _seconds_of(lambda: engine.advance(server, t, 1))
    samples = engine.federation.count[TRAIN, : engine.federation.num_seen].numpy(force=True)
    usual = np.argsort(np.abs(samples - samples.mean()), kind="stable")

    def one_round(number: int) -> None:
        # Rounds are tried with a cohort of `cohorts`, because it counts no bytes.
        for _, cohort in engine.cohorts(np.sort(usual[:number])):
            engine.method.round(server, cohort)

    few = min(clients, engine.processes)
    turns = math.ceil(clients / few)
    seconds = _seconds_of(lambda: one_round(few))
    if turns == 1 or turns * seconds >= TRIED_SECONDS or clients > CLIENTS_AT_ONCE:
        return turns * seconds
    return _seconds_of(lambda: one_round(clients))  # the server's work counts once, not once per turn


def seconds_of_local_training(engine: Engine, server: Any) -> float:
    """Return how long training all clients takes, for a method without rounds; 0 if it is unknown.

    Some clients train for one epoch. A method that has no hyper-parameter `epochs` is not tried.
    """
    epochs = getattr(engine.method, "epochs", 0)
    if not epochs or not dataclasses.is_dataclass(engine.method):
        return 0.0
    short: Any = dataclasses.replace(engine.method, epochs=1)
    samples = engine.federation.count[TRAIN].numpy(force=True)
    size = engine.method.batch_size
    batches = -(-samples // size) if size else np.ones_like(samples)
    if engine.name == "vector":
        # All clients of a cohort do as many steps as the one with the most samples.
        groups = [ids for ids, _ in engine.cohorts(np.arange(len(samples)))]
        work = np.array([batches[ids].max() * len(ids) for ids in groups])
        tried = int(np.argsort(work, kind="stable")[len(work) // 2])
        ids, share = groups[tried], work[tried] / work.sum()
    else:
        ids = np.argsort(batches, kind="stable")[len(batches) // 2 :][:1]  # a client with the median number
        share = engine.processes * batches[ids[0]] / batches.sum()

    def one_epoch() -> None:
        for _, cohort in engine.cohorts(ids):
            short.personalize(server, cohort)  # in this process: workers know only the method itself

    return float(_seconds_of(one_epoch) * epochs / share)


def _seconds_of(work: Callable[[], object]) -> float:
    """Return the usual time of some work. It is done several times if it is short: the first time loads code."""
    found: list[float] = []
    while len(found) < 2 or (len(found) < MEASURED_STRETCHES and sum(found) < SHORT_SECONDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
        if found[0] >= TRIED_SECONDS:
            break
    return median_low(found[1:] or found)


def seconds_on_gpu(model: str, batch_size: int, client_steps: float, clients: int) -> float:
    """Return how long a run takes on a GPU, if there is a figure for such a model; else 0.

    Args:
        model: name of the client model.
        batch_size: samples per step.
        client_steps: steps of all clients in all rounds.
        clients: number of clients in a round.
    """
    speeds = GPU_STEPS.get(model, {}) if batch_size == 32 else {}
    if not speeds or not client_steps:
        return 0.0
    return client_steps / speeds[min(speeds, key=lambda each: abs(math.log(each / clients)))]
