"""Rounds, evaluation, the best round, checkpoints, and stopping when asked to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll import checkpoint
from pefll.checkpoint import Writer
from pefll.config import Config
from pefll.data.federation import TRAIN, VALIDATION, Federation
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.later import Later, copied, fetched
from pefll.errors import PefllError
from pefll.evaluation import Evaluation, Exam
from pefll.events import Events
from pefll.lockstep import Stopped, Turns
from pefll.methods.contract import Method
from pefll.models.probe import check_same_model
from pefll.progress import Monitor
from pefll.record import RunFolder
from pefll.tree import Tree, from_named, map_tree, named_leaves

CHECKPOINT_SECONDS = 300.0
STRETCH_SECONDS = 0.5  # so often the loop looks up: at the clock, at signals, at the bar
# So many stretches of rounds may be under way when the next is launched: a GPU has work while the host records.
AHEAD = 1


class Best(NamedTuple):
    """A best round: see `Progress`."""

    state: Tree
    round: int
    value: float


@dataclass
class Progress:
    """Where a run is: with the federation and the config, all that the rest of the run depends on.

    Attributes:
        round: rounds done.
        server: the method's state.
        best: the state at the best round.
        best_round: the round with the best seen-client validation accuracy so far.
        best_value: that accuracy; -1 before the first evaluation.
        train_seconds: spent in rounds; on a GPU that other runs used at the same time, with the time they took away.
        eval_seconds: spent in evaluations, likewise.
        wall_seconds: by the clock, with everything: compiling, recording, waiting for other runs.
        lockstep: the most runs that were trained together with this one, itself included.
        scheduled: the best that `eval_every` asked for, where an evaluation that only the end of the run asked for was
            better: a longer run, which this may become, has no such evaluation.
    """

    round: int
    server: Tree
    best: Tree
    best_round: int = 0
    best_value: float = -1.0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    wall_seconds: float = 0.0
    lockstep: int = 1
    scheduled: Best | None = None


@dataclass(frozen=True)
class Stretch:
    """Some rounds that are under way.

    Attributes:
        first: rounds done before them.
        last: rounds done after them.
        rounds: to wait for; PefllError where training diverged.
        state: after them, where it is evaluated or saved.
        exam: the evaluation of that state, where one is due.
        copy: of that state in the host's memory, where a checkpoint is due.
        ledger: what had crossed the door after them.
    """

    first: int
    last: int
    rounds: Later[None]
    state: Tree
    exam: Later[Evaluation] | None
    copy: Later[Tree] | None
    ledger: Ledger

    def done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return all(part is None or part.done() for part in (self.rounds, self.exam, self.copy))


def train(
    engine: Engine,
    method: Method[Any],
    config: Config,
    folder: RunFolder | None,
    monitor: Monitor,
    facts: dict[str, Any],
    asked_to_stop: Sequence[int] = (),
    lockstep: int = 1,
) -> Turns[Progress]:
    """Train for `config.rounds` rounds, from the newest checkpoint in `folder` where there is one.

    Work is launched one stretch of rounds ahead of what is recorded, so that a GPU does not wait for the host. What a
    checkpoint holds is copied as it is after its last round, and is written when everything until then is recorded, so
    that it never misses an evaluation; a GPU goes on meanwhile.

    Args:
        engine: reaches the clients.
        method: what to train.
        config: rounds, intervals.
        folder: where to record; None for nowhere.
        monitor: is told how far the run is.
        facts: about the problem, for whoever reads a checkpoint without the data.
        asked_to_stop: the signals that came; looked at after every stretch.
        lockstep: how many runs take turns, this one included.

    Yields:
        When it has given the engine work, and other runs may have a turn.

    Returns:
        The last state and the best one.

    Raises:
        Stopped: when asked to stop, with a checkpoint written.
    """
    progress = _resume(engine, folder, monitor, facts) or _begin(engine)
    between = progress.round < config.rounds and not _scheduled(progress.round, config)
    if between and progress.scheduled is not None:  # the run ended here, and is being extended
        progress.best, progress.best_round, progress.best_value = progress.scheduled
        progress.scheduled = None
    progress.lockstep = max(progress.lockstep, lockstep)
    if folder:
        # Of a run that is being extended; not before, so that one that cannot go on keeps its results.
        folder.summary_file.unlink(missing_ok=True)
        # Also where a run was stopped before its first checkpoint. The evaluation where it ended before goes too, but
        # not where that one's state is the best: checkpoints of earlier versions have no other.
        gone = between and progress.best_round < progress.round
        folder.keep_history_until(progress.round - gone)
    events = Events(folder.path) if folder else None
    monitor.begin(progress.round)
    exam = Exam(engine, method, VALIDATION, evaluated_share(engine, method, config))
    writer = Writer(folder.checkpoints) if folder else None
    under_way: deque[Stretch] = deque()
    launched, size = progress.round, 1
    saved_at, saved_round = time.monotonic(), progress.round
    clock = _since(progress.wall_seconds)
    try:
        while progress.round < config.rounds:
            last = min(
                launched + size,
                config.rounds,
                _next(launched, config.eval_every),
                _next(launched, config.checkpoint_every),
            )
            last = yield from engine.agree(progress.server, launched, last)
            evaluates = _scheduled(last, config) or last == config.rounds
            by_the_clock = time.monotonic() - saved_at > CHECKPOINT_SECONDS
            saves = writer is not None and (by_the_clock or _saved_after(last, config))
            under_way.append(_launch(engine, progress, launched, last, exam if evaluates else None, saves))
            at_once = under_way[-1].done()  # a CPU, or clients elsewhere: there is nothing to go on with meanwhile
            launched = last
            if saves:
                saved_at = time.monotonic()
            yield
            stopping = bool(asked_to_stop)
            while under_way and (
                stopping or launched == config.rounds or len(under_way) > AHEAD or under_way[0].done()
            ):
                stretch = under_way.popleft()
                seconds = _settle(stretch, config, progress, folder, events, monitor)
                progress.wall_seconds = clock()
                if writer is not None and stretch.copy is not None:
                    _save(writer, progress, stretch.copy.wait(), stretch.ledger, engine, facts)
                    saved_round = progress.round
                size = max(1, min(4 * (stretch.last - stretch.first), int(STRETCH_SECONDS / max(seconds, 1e-9))))
                # Again, since a signal mostly comes while a stretch is waited for; else the first of several runs
                # would go on for one more stretch, and never again meet the others.
                stopping = bool(asked_to_stop)
            if stopping and writer is not None and saved_round != progress.round:
                _save(writer, progress, fetched(progress.server, engine.device), engine.ledger, engine, facts)
            if progress.round == config.rounds:
                yield  # others have theirs written at the same time
            if writer is not None and (at_once or stopping or progress.round == config.rounds):
                writer.wait()
                progress.wall_seconds = clock()
            if stopping and progress.round < config.rounds:
                raise Stopped(progress.round, asked_to_stop[0])
        if progress.round == 0 and writer is not None:  # a method that does not train in rounds
            _save(writer, progress, fetched(progress.server, engine.device), engine.ledger, engine, facts)
            writer.wait()
    finally:
        if writer is not None:
            writer.close()
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
    of_client = owned / federation.num_clients
    samples = method.local_epochs * of_client or method.local_steps * float(method.batch_size or of_client)
    trained: float = config.eval_every * engine.clients_per_round * samples
    return min(1.0, 0.25 * trained / owned)


def local_steps(method: Method[Any], federation: Federation) -> float:
    """Return how many gradients of a batch a client computes in a round; a mean where that depends on the client."""
    if not method.local_epochs:
        return method.local_steps
    count = federation.count[TRAIN, : federation.num_seen]
    batches = count if not method.batch_size else (count + method.batch_size - 1) // method.batch_size
    return method.local_epochs * float(batches.double().mean())


def _begin(engine: Engine) -> Progress:
    server = engine.start()
    return Progress(round=0, server=server, best=engine.snapshot(server))


def _scheduled(round_: int, config: Config) -> bool:
    """Return whether an evaluation is due after a round however long the run is."""
    return round_ % config.eval_every == 0


def _saved_after(round_: int, config: Config) -> bool:
    """Return whether a checkpoint is due after a round, whatever the clock says."""
    return round_ % config.checkpoint_every == 0 or round_ == config.rounds


def _next(round_: int, every: int) -> int:
    return (round_ // every + 1) * every


def _since(earlier: float) -> Callable[[], float]:
    """Return a clock that goes on from some seconds."""
    began = time.monotonic() - earlier
    return lambda: time.monotonic() - began


def _launch(
    engine: Engine, progress: Progress, first: int, last: int, exam: Exam | None, saves: bool = False
) -> Stretch:
    """Start the rounds first..last-1, the evaluation of the state after them where there is an exam, and its copy."""
    progress.server, rounds = engine.launch(progress.server, first, last - first)
    # Kept, because later rounds change the server's when this one is being written, or turns out to be the best.
    state = engine.snapshot(progress.server) if exam or saves else None
    with engine.aside():
        evaluation = exam.begin(state) if exam else None
        copy = copied(state, engine.device) if saves else None
    return Stretch(first, last, rounds, state, evaluation, copy, engine.ledger.copy())


def _settle(
    stretch: Stretch,
    config: Config,
    progress: Progress,
    folder: RunFolder | None,
    events: Events | None,
    monitor: Monitor,
) -> float:
    """Wait for a stretch, count it as done and record its evaluation; return the seconds that a round took."""
    stretch.rounds.wait()
    progress.round = stretch.last
    progress.train_seconds += stretch.rounds.seconds
    news = ""
    if stretch.exam is not None:
        result = stretch.exam.wait()
        progress.eval_seconds += stretch.exam.seconds
        # Without validation samples the last round is the best one.
        value = result.seen.per_sample if result.seen else float(progress.round)
        if value > progress.best_value:
            if not _scheduled(progress.round, config):
                progress.scheduled = Best(progress.best, progress.best_round, progress.best_value)
            progress.best_value, progress.best_round, progress.best = value, progress.round, stretch.state
        _record(result, stretch.ledger, progress, folder, events)
        news = str(result)
    monitor.at(progress.round, news)
    return stretch.rounds.seconds / (stretch.last - stretch.first)


def _record(
    result: Evaluation, ledger: Ledger, progress: Progress, folder: RunFolder | None, events: Events | None
) -> None:
    """Write an evaluation into the run's history and TensorBoard's events."""
    row = {
        "round": progress.round,
        "seconds": round(progress.train_seconds, 3),
        "bytes_down": ledger.down,
        "bytes_up": ledger.up,
        "seen": result.seen._asdict() if result.seen else None,
        "unseen": result.unseen._asdict() if result.unseen else None,
    }
    if folder:
        folder.append_history(row)
    if events:
        groups = {"seen": result.seen, "unseen": result.unseen}
        scalars = {f"validation/{g}/{k}": v for g, a in groups.items() if a for k, v in a._asdict().items()}
        events.scalars(scalars, progress.round)


def _save(
    writer: Writer, progress: Progress, server: Tree, ledger: Ledger, engine: Engine, facts: dict[str, Any]
) -> None:
    """Begin to write a checkpoint of the rounds that are recorded; `server` is the state after them, on the host."""
    parts = {"server": server, "best": fetched(progress.best, engine.device)}
    facts = {"problem": facts}
    if progress.scheduled is not None:
        state, round_, value = progress.scheduled
        parts["scheduled"] = fetched(state, engine.device)
        facts["scheduled"] = {"round": round_, "value": value}
    facts["progress"] = {
        "best_round": progress.best_round,
        "best_value": progress.best_value,
        "train_seconds": progress.train_seconds,
        "eval_seconds": progress.eval_seconds,
        "wall_seconds": progress.wall_seconds,
        "lockstep": progress.lockstep,
        "ledger": vars(ledger).copy(),
    }
    tensors = {f"{part}.{name}": leaf for part, state in parts.items() for name, leaf in named_leaves(state)}
    writer.begin(progress.round, tensors, facts)


def _resume(engine: Engine, folder: RunFolder | None, monitor: Monitor, facts: dict[str, Any]) -> Progress | None:
    if folder is None or not any(folder.checkpoints.glob("round-*")):
        return None
    saved = checkpoint.latest(folder.checkpoints, monitor.say)
    checkpoint.drop_newer(folder.checkpoints, saved.round)  # damaged ones; they must not push out good ones
    numbers = dict(saved.facts["progress"])
    template = engine.start()
    vars(engine.ledger).update(numbers.pop("ledger"))  # after `start`, whose exchange it already counts
    scheduled = saved.facts.get("scheduled")
    progress = Progress(
        round=saved.round,
        server=restore(template, saved.tensors, "server"),
        best=restore(template, saved.tensors, "best"),
        scheduled=Best(restore(template, saved.tensors, "scheduled"), **scheduled) if scheduled else None,
        **numbers,
    )
    check_same_model(saved.facts["problem"].get("probe"), facts.get("probe", []), str(folder.path))
    return progress


def restore(template: Tree, tensors: dict[str, Tensor], part: str) -> Tree:
    """Return a state shaped as `template` from the tensors of a checkpoint; PefllError where it is of another model."""
    chosen = {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
    for name, old in named_leaves(template):
        if name in chosen and chosen[name].shape != old.shape:
            shapes = f"shape {list(chosen[name].shape)}, not {list(old.shape)}"
            raise PefllError(f"the checkpoint's {name} has {shapes}: the run was trained with another model or clients")
    # Copied into memory of torch's own: numbers at odd addresses would be rounded differently on a CPU.
    return map_tree(lambda old, new: torch.empty_like(old).copy_(new), template, from_named(template, chosen))
