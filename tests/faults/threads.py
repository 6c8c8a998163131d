"""Threads that personalise, predict, evaluate, load and train at once get, bit for bit, what one thread gets.

    python -m tests.faults.threads --count 100000 --threads 16 --out results/faults.json

Python changes threads as often as it can meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

import pefll
from pefll.core.tree import leaves
from pefll.data.samples import TRAIN
from tests.faults.record import FILE, record

METHODS = ("pefll", "fedavg", "knn-per", "fedrep")
ENGINES = ("serial", "vector")
CLIENTS, ROUNDS = 20, 2

Client = tuple[Any, Any]


class Job(NamedTuple):
    """Something that threads do, and what one thread alone got for it: tensors, of which every bit counts."""

    do: Callable[[], list[Tensor]]
    alone: list[Tensor]

    def differs(self) -> bool:
        """Do it, and return whether a bit is not what one thread alone got."""
        return not same(self.do(), self.alone)


class Tally:
    """Counts what threads did, and what of it was wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.tried = self.different = 0
        self.errors: list[str] = []

    def add(self, different: bool, error: BaseException | None = None) -> None:
        """Note one thing that was done."""
        with self._lock:
            self.tried += 1
            self.different += different
            if error is not None:
                self.errors.append(f"{type(error).__name__}: {error}")

    def figures(self) -> dict[str, Any]:
        """Return the counts; what differs was accepted silently, and any error of these is one for no reason."""
        kinds = sorted(set(self.errors))[:5]
        counts = {"tried": self.tried, "accepted_silently": self.different, "tracebacks": len(self.errors)}
        return counts | ({"errors": kinds} if kinds else {})


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether tensors are the same, bit for bit."""
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in ((one.reshape(-1), other.reshape(-1)) for one, other in zip(ours, theirs, strict=True))
    )


@contextmanager
def switching(seconds: float = 1e-6) -> Iterator[None]:
    """Let Python change threads that often in the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def digits(seed: int = 0) -> pefll.Federation:
    """Return clients that have some of scikit-learn's digits each."""
    samples = pefll.load_samples("digits")
    return pefll.make_federation(samples, partition="by-class 3", clients=CLIENTS, unseen=0.25, seed=seed)


def trained(federation: pefll.Federation, method: str, engine: str, **others: Any) -> pefll.Run:
    """Return a run of some rounds."""
    short: dict[str, Any] = {"client_lr": 0.02, "batch_size": 8} | (
        {"body_epochs": 1, "head_epochs": 1, "new_epochs": 1} if method == "fedrep" else {"local_steps": 3}
    )
    asked = {"model": "tiny", "rounds": ROUNDS, "clients_per_round": 3, "device": "cpu", "processes": 1} | others
    return pefll.fit(federation, method, engine=engine, **short, **asked)


def new_clients(federation: pefll.Federation, count: int = 5) -> list[Client]:
    """Return the training samples and labels of the last clients, which no run has seen."""
    rows = [federation.indices(client, TRAIN) for client in range(federation.num_clients)[-count:]]
    return [(federation.x[places].numpy(), federation.y[places].numpy()) for places in rows]


def weights(model: pefll.PersonalModel) -> list[Tensor]:
    """Return all that a personal model has learnt."""
    return [value.detach() for value in model.state_dict().values()]


def personalising(run: pefll.Run, clients: Sequence[Client]) -> list[Job]:
    """Return a job for each client: its model."""
    functions = [lambda x=x, y=y: weights(run.personalize(x, y)) for x, y in clients]
    return [Job(function, function()) for function in functions]


def mixed(run: pefll.Run, clients: Sequence[Client], folder: Path) -> list[Job]:
    """Return one job of each kind that a server of personal models has: all of them work on one run.

    Args:
        run: that was trained into the folder.
        clients: their samples and labels.
        folder: of the run.
    """
    x, y = clients[0]
    model = run.personalize(x, y)
    file = folder / "model.safetensors"
    model.save(file)
    functions: list[Callable[[], list[Tensor]]] = [
        lambda: weights(run.personalize(x, y)),
        lambda: [torch.from_numpy(model.probabilities(x))],
        lambda: [torch.from_numpy(run.personalize(x, y).predict(x))],
        lambda: weights(pefll.PersonalModel.load(file)),
        lambda: weights(pefll.load(folder).personalize(x, y)),
        lambda: [torch.tensor([list(score[3:]) for score in run.evaluate_clients("test")], dtype=torch.float64)],
    ]
    return [Job(function, function()) for function in functions]


def fitting(federation: pefll.Federation, methods: Sequence[str], engines: Sequence[str], **others: Any) -> list[Job]:
    """Return a job for each method and engine: a whole training."""

    def state(method: str, engine: str) -> list[Tensor]:
        run = trained(federation, method, engine, **others)
        return [leaf.detach().cpu() for leaf in (*leaves(run.server), *leaves(run.final))]

    functions = [lambda method=method, engine=engine: state(method, engine) for method in methods for engine in engines]
    return [Job(function, function()) for function in functions]


def at_once(jobs: Sequence[Job], count: int, threads: int, done: Callable[[int], None] = lambda _: None) -> Tally:
    """Let threads do jobs, one after another of the list and from its beginning again, so many in all.

    Args:
        jobs: what to do.
        count: how many times something is done.
        threads: how many do them at once.
        done: is told, now and then, how many are.
    """
    tally, numbers, barrier = Tally(), itertools.count(), threading.Barrier(threads)

    def work(_: int) -> None:
        barrier.wait()
        while (number := next(numbers)) < count:
            try:
                tally.add(jobs[number % len(jobs)].differs())
            except Exception as error:  # noqa: BLE001 - it is counted
                tally.add(False, error)
            if number % 50 == 0:
                done(tally.tried)

    with switching(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    done(count)
    return tally


def in_pairs(jobs: Sequence[Job], repeats: int, done: Callable[[int], None] = lambda _: None) -> Tally:
    """Let two threads do each job at the same time, so many times; see `at_once`."""
    tally = Tally()
    for number, job in enumerate(jobs * repeats):
        pair = at_once([job], 2, 2)
        for _ in range(pair.tried):
            tally.add(False)
        tally.different += pair.different
        tally.errors += pair.errors
        done(2 * number + 2)
    return tally


def main() -> int:
    """Do it all, and keep the figures; return 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="of personalisations")
    parser.add_argument("--mixed", type=int, default=2_000, help="of personalisations, evaluations, loads and the like")
    parser.add_argument("--fits", type=int, default=5, help="pairs of trainings for each method and engine")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began, federation = time.monotonic(), digits()
    clients = new_clients(federation)
    tallies: dict[str, Tally] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as bars,
    ):

        def shown(name: str, total: int, work: Callable[[Callable[[int], None]], Tally]) -> None:
            bar = bars.add_task(name, total=total)
            tallies[name] = work(lambda done: bars.update(bar, completed=done))

        run = trained(federation, "pefll", "serial", out=Path(folder) / "run")
        jobs = personalising(run, clients)
        shown("personalisations", options.count, lambda done: at_once(jobs, options.count, options.threads, done))
        others = mixed(run, clients, Path(folder) / "run")
        shown("mixed", options.mixed, lambda done: at_once(others, options.mixed, options.threads, done))
        fits = fitting(federation, METHODS, ENGINES)
        shown("fits", 2 * options.fits * len(fits), lambda done: in_pairs(fits, options.fits, done))
    figures: dict[str, Any] = {name: tally.figures() for name, tally in tallies.items()}
    totals = {key: sum(one[key] for one in figures.values()) for key in ("tried", "accepted_silently", "tracebacks")}
    command = (
        f"python -m tests.faults.threads --count {options.count} --mixed {options.mixed} --fits {options.fits} "
        f"--threads {options.threads}"
    )
    extra = {"threads": options.threads, "seconds": round(time.monotonic() - began)}
    record(options.out, "threads", command, totals | figures | extra)
    Console().print({**totals, **figures, **extra})
    return int(totals["accepted_silently"] + totals["tracebacks"] > 0)


if __name__ == "__main__":
    sys.exit(main())
