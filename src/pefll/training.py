"""Rounds, evaluation, the best round, checkpoints, and stopping when asked to."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pefll import checkpoint
from pefll.config import Config
from pefll.data.federation import VALIDATION
from pefll.engines.cohort import Engine
from pefll.evaluation import evaluate
from pefll.events import Events
from pefll.methods.contract import Method
from pefll.progress import Monitor
from pefll.record import RunFolder
from pefll.tree import Tree, from_named, map_tree, named_leaves

CHECKPOINT_SECONDS = 300.0
CHUNK_SECONDS = 0.5  # so often the loop looks up: at the clock, at signals, at the bar


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and did; what it had done is saved if it has a folder.

    Attributes:
        round: rounds done.
        signal: the signal's number.
    """

    def __init__(self, round_: int, number: int) -> None:
        super().__init__(f"stopped after round {round_}")
        self.round, self.signal = round_, number


@dataclass
class Progress:
    """Where a run is: with the federation and the config, all that the rest of the run depends on.

    Attributes:
        round: rounds done.
        server: the method's state.
        best: the state at the best round.
        best_round: the round with the best seen-client validation accuracy so far.
        best_value: that accuracy; -1 before the first evaluation.
        train_seconds: spent in rounds.
        eval_seconds: spent in evaluations.
    """

    round: int
    server: Tree
    best: Tree
    best_round: int = 0
    best_value: float = -1.0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0


def train(
    engine: Engine,
    method: Method[Any],
    config: Config,
    folder: RunFolder | None,
    monitor: Monitor,
    facts: dict[str, Any],
) -> Progress:
    """Train for `config.rounds` rounds, from the newest checkpoint in `folder` where there is one.

    Args:
        engine: reaches the clients.
        method: what to train.
        config: rounds, intervals.
        folder: where to record; None for nowhere.
        monitor: is told how far the run is.
        facts: about the problem, for whoever reads a checkpoint without the data.

    Returns:
        The last state and the best one.

    Raises:
        Stopped: after Ctrl-C or SIGTERM, with a checkpoint written.
    """
    progress = _resume(engine, folder, monitor) or _begin(engine)
    if folder:
        folder.keep_history_until(progress.round)  # also where a run was stopped before its first checkpoint
    events = Events(folder.path) if folder else None
    saved_at, saved_round, chunk = time.monotonic(), progress.round, 1
    monitor.begin(progress.round)
    share = evaluated_share(engine, method, config)
    with _signals() as asked_to_stop:
        while progress.round < config.rounds:
            boundary = min(
                config.rounds, _next(progress.round, config.eval_every), _next(progress.round, config.checkpoint_every)
            )
            chunk_done = _advance(engine, progress, min(chunk, boundary - progress.round))
            chunk = max(1, min(4 * chunk, int(CHUNK_SECONDS / max(chunk_done, 1e-9))))
            news = ""
            if progress.round % config.eval_every == 0 or progress.round == config.rounds:
                news = _evaluate(engine, method, progress, folder, events, share)
            monitor.at(progress.round, news)
            due = progress.round % config.checkpoint_every == 0 or time.monotonic() - saved_at > CHECKPOINT_SECONDS
            finished = progress.round == config.rounds
            if folder and (due or finished or asked_to_stop) and saved_round != progress.round:
                _save(engine, progress, folder, facts)
                saved_at, saved_round = time.monotonic(), progress.round
            if asked_to_stop and not finished:
                raise Stopped(progress.round, asked_to_stop[0])
        if progress.round == 0 and folder:  # a method that does not train in rounds
            _save(engine, progress, folder, facts)
    if events:
        events.close()
    return progress


def evaluated_share(engine: Engine, method: Method[Any], config: Config) -> float:
    """Return the share of clients that evaluations during training use.

    Evaluating a sample costs a forward pass, and training on one about three times that; so a quarter as many samples
    as are trained on between two evaluations cost some 5% to 8% on a CPU, and less on a GPU.
    """
    federation = engine.federation
    if config.eval_clients:
        return config.eval_clients / federation.num_clients
    owned = float(federation.count[: VALIDATION + 1].sum())
    batch = float(method.batch_size or owned / federation.num_clients)
    trained: float = config.eval_every * engine.clients_per_round * method.local_steps * batch
    return min(1.0, 0.25 * trained / owned)


def _begin(engine: Engine) -> Progress:
    server = engine.start()
    return Progress(round=0, server=server, best=map_tree(torch.clone, server))


def _next(round_: int, every: int) -> int:
    return (round_ // every + 1) * every


def _advance(engine: Engine, progress: Progress, rounds: int) -> float:
    """Do some rounds and return the seconds one took."""
    started = time.perf_counter()
    progress.server = engine.advance(progress.server, progress.round, rounds)
    seconds = time.perf_counter() - started
    progress.round += rounds
    progress.train_seconds += seconds
    return seconds / rounds


def _evaluate(
    engine: Engine,
    method: Method[Any],
    progress: Progress,
    folder: RunFolder | None,
    events: Events | None,
    share: float,
) -> str:
    """Measure validation accuracy, remember the best state, record it, and return it in words."""
    started = time.perf_counter()
    result = evaluate(engine, method, progress.server, VALIDATION, share=share)
    # Without validation samples the last round is the best one.
    value = result.seen.per_sample if result.seen else float(progress.round)
    if value > progress.best_value:
        progress.best_value, progress.best_round = value, progress.round
        map_tree(lambda old, new: old.copy_(new), progress.best, progress.server)
    progress.eval_seconds += time.perf_counter() - started
    row = {
        "round": progress.round,
        "seconds": round(progress.train_seconds, 3),
        "bytes_down": engine.ledger.down,
        "bytes_up": engine.ledger.up,
        "seen": result.seen._asdict() if result.seen else None,
        "unseen": result.unseen._asdict() if result.unseen else None,
    }
    if folder:
        folder.append_history(row)
    if events:
        groups = {"seen": result.seen, "unseen": result.unseen}
        scalars = {f"validation/{g}/{k}": v for g, a in groups.items() if a for k, v in a._asdict().items()}
        events.scalars(scalars, progress.round)
    return str(result)


def _save(engine: Engine, progress: Progress, folder: RunFolder, facts: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    for part, tree in (("server", progress.server), ("best", progress.best)):
        tensors |= {f"{part}.{name}": leaf for name, leaf in named_leaves(tree)}
    numbers = {
        "best_round": progress.best_round,
        "best_value": progress.best_value,
        "train_seconds": progress.train_seconds,
        "eval_seconds": progress.eval_seconds,
        "ledger": vars(engine.ledger),
    }
    checkpoint.save(folder.checkpoints, progress.round, tensors, {"problem": facts, "progress": numbers})


def _resume(engine: Engine, folder: RunFolder | None, monitor: Monitor) -> Progress | None:
    if folder is None or not any(folder.checkpoints.glob("round-*")):
        return None
    saved = checkpoint.latest(folder.checkpoints, monitor.say)
    checkpoint.drop_newer(folder.checkpoints, saved.round)  # damaged ones; they must not push out good ones
    numbers = dict(saved.facts["progress"])
    template = engine.start()
    vars(engine.ledger).update(numbers.pop("ledger"))  # after `start`, whose exchange it already counts
    return Progress(
        round=saved.round,
        server=restore(template, saved.tensors, "server"),
        best=restore(template, saved.tensors, "best"),
        **numbers,
    )


def restore(template: Tree, tensors: dict[str, Tensor], part: str) -> Tree:
    """Return a state shaped as `template` from the tensors of a checkpoint."""
    chosen = {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
    # Copied into memory of torch's own: numbers at odd addresses would be rounded differently on a CPU.
    return map_tree(lambda old, new: torch.empty_like(old).copy_(new), template, from_named(template, chosen))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of dying of them; a second Ctrl-C ends the run at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
