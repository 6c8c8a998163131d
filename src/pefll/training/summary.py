"""The summary of a run: metrics, costs, and how it was made."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pefll.backend.native import compiler, pooled
from pefll.core.files import write_whole
from pefll.core.progress import Display, Monitor
from pefll.core.signals import Signals, Stopped
from pefll.core.tree import Tree
from pefll.core.wording import counted
from pefll.data import DATASETS
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS, TEST, TRAIN, VALIDATION
from pefll.data.summary import client_means, label_names
from pefll.engines.cohort import Engine
from pefll.engines.hardware import device_name, peak_memory_bytes
from pefll.methods import hyperparameters, split_networks
from pefll.methods.contract import Method
from pefll.report.descriptors import Descriptors
from pefll.runs.client_names import entry_of
from pefll.runs.progress import Progress
from pefll.runs.record import ALONE, TOOK_TURNS, RunFolder
from pefll.tasks.settings import with_names
from pefll.training.callbacks import ActiveRun
from pefll.training.evaluation import Measure, client_scores, descriptors
from pefll.training.loop import local_steps
from pefll.version import __version__

MAP_CLIENTS = 10_000  # most clients of a descriptor map
AS_NEW_CLIENTS = 100  # seen clients that a search treats as new, to tune the training of new clients
COUNTED_CLIENTS = 10_000  # a summary has counts of at most so many clients, to stay small


def counting(watch: Monitor) -> Callable[[int], None]:
    """Return a function that adds a number of clients to a monitor."""
    finished = 0

    def report(clients: int) -> None:
        nonlocal finished
        finished += clients
        watch.at(finished)

    return report


def _stopped(run: ActiveRun, progress: Progress) -> dict[str, Any]:
    """Return who ended a run, the rounds that were planned, and the round after which it ended."""
    return {"by": run.stopped_by, "rounds": run.spec.config.rounds, "after_round": progress.round}


def summary_of(
    engine: Engine,
    run: ActiveRun,
    progress: Progress,
    screen: Display,
    asked_to_stop: Signals,
) -> dict[str, Any]:
    """Score the best and the last state on test samples and return the run's summary.

    A trial of a search is scored on validation samples of seen and held-out clients. If new clients train something,
    some seen clients are also scored as new clients, so that the search can tune this training.

    Raises:
        Stopped: after a signal. All rounds are saved, and a resumed run repeats the test.
    """
    spec = run.spec
    config, federation, method = spec.config, spec.federation, spec.method
    split = VALIDATION if spec.tunes else TEST
    clients = federation.num_seen if spec.tunes and not spec.holds_out else federation.num_clients
    new_ones_train = spec.tunes and method.trains_in_rounds and method.trains_new_clients
    as_new_clients = min(federation.num_seen, AS_NEW_CLIENTS) if new_ones_train else 0
    moments = ("best",) if spec.tunes else ("best", "final")
    different = "final" in moments and progress.best_round != progress.round
    started = time.perf_counter()
    stopped = partial(Stopped, progress.round, testing=True)
    doing = "testing" if method.trains_in_rounds else "training and testing"
    title = f"{doing} {spec.label or f'seed {config.seed}'}"
    with (
        screen.line(title, clients * (1 + different) + as_new_clients) as watch,
        # One client may train for half a minute. A stopped test has no result, so it can stop at once.
        asked_to_stop.raising(stopped) if engine.breaks_off else nullcontext(),
    ):
        count = counting(watch)

        def report(clients: int) -> None:
            if asked_to_stop:
                raise stopped(asked_to_stop[0])
            count(clients)

        sums = {"best": client_scores(engine, method, progress.best, np.arange(clients), split, report)}
        if different:
            sums["final"] = client_scores(engine, method, progress.server, np.arange(clients), split, report)
        if as_new_clients:
            sums["as new"] = client_scores(
                engine, method, progress.best, np.arange(as_new_clients), split, report, True
            )
    measure = Measure.of(method, federation)
    results = {
        moment: measure.evaluation(sums.get(moment, sums["best"]), federation.num_seen).rows() for moment in moments
    }
    as_new = measure.group(sums["as new"]) if as_new_clients else None
    c = spec.clients_per_round
    steps = local_steps(method, federation)
    seconds = progress.train_seconds
    settings = {name: getattr(method, name) for name in hyperparameters(config.method)}
    return {
        "command": config.command() if config.data in DATASETS or Path(config.data).exists() else "",
        "method": config.method,
        "settings": split_networks(config.method, settings)[0],
        "dataset": federation.name,
        "partition": federation.partition,
        "model": spec.model,
        "num_clients": federation.num_clients,
        "num_seen": federation.num_seen,
        "num_unseen": federation.num_unseen,
        **({"named_unseen": True} if federation.named_unseen else {}),
        **({"tests_last": True} if federation.tests_last else {}),
        "rounds": progress.round,
        **({"stopped": _stopped(run, progress)} if progress.round < config.rounds else {}),
        "clients_per_round": c,
        **({"prior_clients": config.prior_clients} if config.prior_clients else {}),
        **({"sampling": config.sampling} if config.sampling != "uniform" else {}),
        "local_steps": steps,
        "seed": config.seed,
        "engine": engine.name,
        "engines": [{"engine": name, "after_round": first} for name, first in progress.engines],
        "device": device_name(engine.device),
        "processes": engine.processes,
        "precision": spec.hardware.precision,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        # The compiler of CPU kernels. With another compiler or none, a run differs by rounding.
        "compiler": compiler.version() if engine.device.type == "cpu" and pooled.works() else None,
        "lockstep": progress.lockstep,
        "timing": _timing(progress.lockstep, engine.device),
        "train_seconds": round(seconds, 3),
        "eval_seconds": round(progress.eval_seconds, 3),
        "wall_seconds": round(progress.wall_seconds, 3),
        "seconds_per_round": round(seconds / progress.round, 5) if progress.round else None,
        "client_steps_per_second": round(progress.round * c * steps / seconds, 1) if seconds and steps else None,
        "bytes_down": engine.ledger.down,
        "bytes_up": engine.ledger.up,
        "peak_memory_bytes": peak_memory_bytes(engine.device),
        "best_round": progress.best_round,
        "test_seconds": round(time.perf_counter() - started, 3),
        "data_sha256": config.data_sha256,
        "fingerprints": spec.fingerprints(config.rounds),
        "split": SPLITS[split],
        **({"task": with_names(config.task, method.problem.task)} if config.task else {}),
        "accuracy" if measure.classifies else "metrics": results,
        "shares": list(measure.shares),  # metrics in per cent
        "errors": list(measure.errors),  # metrics that are better when smaller
        **({"as_new": as_new[0]} if as_new else {}),
        **(measure.of_clients(sums["best"], federation.num_seen) if clients <= COUNTED_CLIENTS else _NO_COUNTS),
        **entry_of(federation),
    }


# Of a run with too many clients.
_NO_COUNTS = {"client_counts": None}


def _timing(lockstep: int, device: torch.device) -> str:
    """Return a sentence about what the seconds of a run include.

    A run does not see other processes on its device. Set PEFLL_SHARED=1 if there are other processes.
    """
    others = counted(lockstep - 1, "other run")
    takes_turns = lockstep == 1 or device.type == "cpu"
    if takes_turns and os.environ.get("PEFLL_SHARED", "0") != "0":
        return "shared the device with other processes: seconds are of this run while they slowed it down"
    if lockstep == 1:
        return ALONE
    if takes_turns:
        return f"{TOOK_TURNS} with {others}; seconds are of this run's own turns, but wall_seconds"
    return (
        f"shared the device with {others}: seconds are of this run while they slowed it down, steps "
        "per second are its share of the device's, and peak memory is that of all together"
    )


def described(engine: Engine, method: Method[Any], server: Tree, federation: Federation) -> Descriptors | None:
    """Return the descriptors of all clients, for the descriptor map; None for too many clients, or without any."""
    if federation.num_clients > MAP_CLIENTS or not len(federation.rows):  # no rows: only clients have labels
        return None
    v = descriptors(engine, method, server)
    if v is None:
        return None
    kind, names = federation.labels, label_names(federation)
    seen = np.arange(federation.num_clients) < federation.num_seen
    found = Descriptors(v, federation.histograms(), seen, tuple(names) if kind != "numbers" else ())
    if kind == "classes":
        return found
    samples = federation.count[TRAIN].cpu().numpy()
    if kind == "sets":
        return replace(found, labels=kind, samples=samples)
    # A histogram has groups without names; the map shows the first column.
    means, name = client_means(federation)[:, 0], names[0] if names else ""
    return replace(found, labels=kind, samples=samples, means=means, label_name=name)


def write_descriptors(
    engine: Engine, method: Method[Any], server: Tree, federation: Federation, folder: RunFolder
) -> None:
    """Write the descriptors of all clients to the run's folder, for the descriptor map."""
    found = described(engine, method, server, federation)
    if found is not None:
        of_labels: dict[str, Any] = {}
        if found.labels != "classes":
            of_labels = {"labels": np.array(found.labels), "samples": found.samples}
        if found.labels == "numbers":
            of_labels |= {"means": found.means, "label_name": np.array(found.label_name)}
        content = io.BytesIO()
        np.savez_compressed(
            content,
            descriptors=found.descriptors,
            histograms=found.histograms,
            seen=found.seen,
            run=np.array(folder.run_id()),
            class_names=np.array(found.class_names, dtype=str),
            **of_labels,
        )
        write_whole(folder.descriptors_file, content.getvalue())


def commit() -> str:
    """Return the package's git commit, with "+changes" after it if files have changed; "" outside a checkout."""
    if "PEFLL_COMMIT" in os.environ:  # for a copy of the code without git
        return os.environ["PEFLL_COMMIT"]
    here = Path(__file__).parent
    try:
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True)
    if name.returncode or tracked.returncode:  # no checkout, or the checkout of another project
        return ""
    return name.stdout.strip() + ("+changes" if state.stdout.strip() else "")
