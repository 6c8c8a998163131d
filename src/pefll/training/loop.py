"""Rounds, evaluation, the best round, checkpoints, and stopping when asked to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pefll.core.signals import Stopped
from pefll.data.federation import TRAIN, Federation
from pefll.engines.cohort import Engine
from pefll.methods.contract import Method
from pefll.runs.config import Config
from pefll.runs.progress import Best, Progress, start_or_resume
from pefll.runs.saver import Saver
from pefll.training.callbacks import ActiveRun, Callback, Row
from pefll.training.evaluation import Evaluation
from pefll.training.pipeline import Pipeline, Stretch
from pefll.training.round_robin import Turns


def train(
    engine: Engine,
    run: ActiveRun,
    callbacks: Sequence[Callback],
    say: Callable[[str], None],
    asked_to_stop: Sequence[int] = (),
    lockstep: int = 1,
) -> Turns[Progress]:
    """Train for as many rounds as the run's config says, from the newest checkpoint in its folder.

    Work is launched some stretches of rounds ahead of what is recorded, so that a GPU does not wait for the host. What
    a checkpoint holds is copied as it is after its last round, and is written when everything until then is recorded,
    so that it never misses an evaluation; a GPU goes on meanwhile.

    Args:
        engine: reaches the clients.
        run: what to train; its round and its history are kept up to date.
        callbacks: are told what happens.
        say: is told of what is unusual, in sentences.
        asked_to_stop: the signals that came; looked at after every stretch.
        lockstep: how many runs take turns, this one included.

    Yields:
        When it has given the engine work, and other runs may have a turn.

    Returns:
        The last state and the best one.

    Raises:
        Stopped: when asked to stop by a signal, with a checkpoint written.
    """
    config = run.spec.config
    progress, run.history = start_or_resume(engine, config, run.spec.folder, say)
    run.round = progress.round
    progress.lockstep = max(progress.lockstep, lockstep)
    began = time.monotonic() - progress.wall_seconds
    for each in callbacks:
        each.on_start(run)
    saver = Saver(engine, config, run.spec.folder, run.spec.facts, run.round, partial(_saved, callbacks, run))
    pipeline = Pipeline(engine, run.spec, progress, saver)
    try:
        while run.round < config.rounds and not run.stopped_by and not (asked_to_stop and pipeline.idle):
            if not asked_to_stop:
                pipeline.launch()  # the next rounds, and the evaluation and the copy for a checkpoint that are due
                yield  # other runs have a turn
            for stretch in pipeline.finished(asked_to_stop):
                run.round = progress.round = stretch.last
                progress.train_seconds += stretch.rounds.seconds
                if stretch.evaluation is not None:
                    run.history.append(_evaluated(stretch, stretch.evaluation.wait(), progress, config))
                    for each in callbacks:
                        if each.on_evaluation(run, run.history[-1]) and not run.stopped_by:
                            run.stopped_by = type(each).__name__
                    if run.stopped_by:
                        pipeline.end_with(stretch)
                progress.wall_seconds = time.monotonic() - began
                if stretch.copy is not None:
                    saver.save(progress, stretch.copy.wait(), stretch.ledger)
                for each in callbacks:
                    each.on_rounds(run)
            if not pipeline.works_on:  # then no round begins before the last checkpoint is kept
                saver.save_if_overdue(progress)
                saver.wait()
        saver.save_now(progress)
        ended = run.round == config.rounds or run.stopped_by
        if ended:
            yield  # others have theirs written at the same time
        saver.wait()
        progress.wall_seconds = time.monotonic() - began
        if not ended:
            raise Stopped(run.round, asked_to_stop[0])
    finally:
        saver.close()
    if run.round < config.rounds:
        say(f"{run.spec.title}: ended after round {run.round} of {config.rounds} by {run.stopped_by}")
    return progress


def _saved(callbacks: Sequence[Callback], run: ActiveRun, round_: int) -> None:
    for each in callbacks:
        each.on_checkpoint(run, round_)


def _evaluated(stretch: Stretch, result: Evaluation, progress: Progress, config: Config) -> Row:
    """Return the evaluation after a stretch as a row of the history, and note where its state is the best one."""
    assert stretch.evaluation is not None
    progress.eval_seconds += stretch.evaluation.seconds
    # Without validation samples the last round is the best one.
    value = result.seen.per_sample if result.seen else float(progress.round)
    if value > progress.best_value:
        if progress.round % config.eval_every:  # only the end of the run asked for this evaluation
            progress.scheduled = Best(progress.best, progress.best_round, progress.best_value)
        progress.best_value, progress.best_round, progress.best = value, progress.round, stretch.state
    return {
        "round": progress.round,
        "seconds": round(progress.train_seconds, 3),
        "bytes_down": stretch.ledger.down,
        "bytes_up": stretch.ledger.up,
        "engine": progress.engines[-1][0],
        "seen": result.seen._asdict() if result.seen else None,
        "unseen": result.unseen._asdict() if result.unseen else None,
    }


def local_steps(method: Method[Any], federation: Federation) -> float:
    """Return how many gradients of a batch a client computes in a round; a mean where that depends on the client."""
    if not method.local_epochs:
        return method.local_steps
    count = federation.count[TRAIN, : federation.num_seen]
    batches = count if not method.batch_size else (count + method.batch_size - 1) // method.batch_size
    return method.local_epochs * float(batches.double().mean())
