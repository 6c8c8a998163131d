"""Rounds, evaluation, the best round, checkpoints, and stopping when asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pefll.core.signals import Stopped
from pefll.data.federation import TRAIN, VALIDATION, Federation
from pefll.engines.cohort import Engine
from pefll.engines.device_queue import queue_of
from pefll.methods.contract import Method
from pefll.runs.config import Config
from pefll.runs.progress import Best, Progress, resume
from pefll.runs.saver import Saver
from pefll.training.callbacks import ActiveRun, Callback, Row
from pefll.training.evaluation import Evaluation, Evaluator
from pefll.training.pipeline import Pipeline, Stretch, is_scheduled
from pefll.training.round_robin import Turns


def train(
    engine: Engine,
    run: ActiveRun,
    callbacks: Callback,
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
    config, method = run.spec.config, run.spec.method
    progress = _start_or_resume(engine, run, say)
    progress.lockstep = max(progress.lockstep, lockstep)
    began = time.monotonic() - progress.wall_seconds
    callbacks.on_start(run)
    evaluator = Evaluator(engine, method, VALIDATION, evaluated_share(engine, method, config))
    told = partial(callbacks.on_checkpoint, run)
    saver = Saver(engine, config, run.spec.folder, run.spec.facts, run.round, told)
    pipeline = Pipeline(engine, config, progress, evaluator, saver)
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
                    if callbacks.on_evaluation(run, run.history[-1]):
                        pipeline.end_with(stretch)
                progress.wall_seconds = time.monotonic() - began
                if stretch.copy is not None:
                    saver.save(progress, stretch.copy.wait(), stretch.ledger)
                callbacks.on_rounds(run)
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


def _evaluated(stretch: Stretch, result: Evaluation, progress: Progress, config: Config) -> Row:
    """Return the evaluation after a stretch as a row of the history, and note where its state is the best one."""
    assert stretch.evaluation is not None
    progress.eval_seconds += stretch.evaluation.seconds
    # Without validation samples the last round is the best one.
    value = result.seen.per_sample if result.seen else float(progress.round)
    if value > progress.best_value:
        if not is_scheduled(progress.round, config):
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


def _start_or_resume(engine: Engine, run: ActiveRun, say: Callable[[str], None]) -> Progress:
    """Return how far a run is, with a folder that has nothing of what comes after that."""
    config, folder = run.spec.config, run.spec.folder
    progress, copy = resume(engine, folder, say) or (_begin(engine), None)
    if before := progress.take_over(engine.name):
        say(f"rounds up to {progress.round} were done by the engine {before}; {engine.name} goes on with them")
    between = progress.round < config.rounds and not is_scheduled(progress.round, config)
    if between and progress.scheduled is not None:  # the run ended here, and is being extended
        progress.best, progress.best_round, progress.best_value = progress.scheduled
        progress.scheduled = None
    if folder:
        # Also where a run was stopped before its first checkpoint. The evaluation where it ended before goes too, but
        # not where that one's state is the best: checkpoints of earlier versions have no other.
        gone = between and progress.best_round < progress.round
        if progress.round == 0 and os.path.lexists(folder.history_file) and config.rounds:
            say(f"{folder.path} has no checkpoint: the run starts anew")
        run.history = folder.keep_history_until(progress.round - gone, copy, say)
        # Of a run that is being extended; not before, so that one that cannot go on keeps its results.
        folder.put_summary_away(say)
    run.round = progress.round
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
    return Progress(round=0, server=server, best=queue_of(engine).snapshot(server))
