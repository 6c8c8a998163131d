"""The training loop: rounds, evaluations, the best round, checkpoints, and stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pefll.core.signals import Stopped
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN
from pefll.engines.cohort import Engine
from pefll.methods.contract import Method
from pefll.runs.config import Config
from pefll.runs.progress import Best, Progress
from pefll.runs.saver import Saver
from pefll.training.callbacks import ActiveRun, Callback, Row, name_of
from pefll.training.estimate import Estimate
from pefll.training.figures import Evaluation
from pefll.training.pipeline import Pipeline, Stretch
from pefll.training.round_robin import Turns

MOST = 1e14  # checkpoints hold numbers up to 1e15


def train(
    engine: Engine,
    run: ActiveRun,
    progress: Progress,
    callbacks: Sequence[Callback],
    say: Callable[[str], None],
    asked_to_stop: Sequence[int] = (),
    runs_at_once: int = 1,
    told: float = 0.0,
) -> Turns[None]:
    """Train a run from its current round to the last one; `run` and `progress` are updated in place.

    New rounds are launched before the results of earlier rounds are read, so that a GPU does not wait for the host. A
    checkpoint is a copy of the state after its round. It is written after all evaluations up to that round are read,
    so that none is missing.

    Args:
        engine: runs the rounds.
        run: the run to train, as callbacks see it.
        progress: the server's state, the best state, and times.
        callbacks: called on events of the run.
        say: gets a sentence if a callback ends the run.
        asked_to_stop: signals received so far, read after every stretch of rounds.
        runs_at_once: number of runs that take turns, for the estimate of the time.
        told: seconds per round that the user was told before the first one; 0 for none.

    Yields:
        After work is launched, so that other runs have a turn.

    Raises:
        Stopped: after a signal, with a checkpoint written.
        PefllError: if a callback failed, with a checkpoint written.
    """
    config = run.spec.config
    run.round, run.stopped_by = progress.round, progress.stopped.get("by", "")
    began = time.monotonic() - progress.wall_seconds
    for each in callbacks:
        each.on_start(run)
    spec, code = run.spec, run.spec.fingerprints(config.rounds)
    saver = Saver(engine, config, spec.folder, spec.model_spec, run.round, code, partial(_saved, callbacks, run))
    pipeline = Pipeline(engine, run.spec, progress, saver)
    # A GPU shares its time among runs, and real clients come and go: their first rounds say little.
    on_cpu = engine.name in ("serial", "vector") and not pipeline.works_on
    estimate = Estimate(config.rounds, runs_at_once, told) if on_cpu else None
    try:
        while run.round < config.rounds and not run.stopped_by and not (run.ends(asked_to_stop) and pipeline.idle):
            if not run.ends(asked_to_stop):
                pipeline.launch()  # the next rounds, with the evaluation and the checkpoint that are due
                yield  # other runs have a turn
            for stretch in pipeline.finished(partial(run.ends, asked_to_stop)):
                run.round = progress.round = stretch.last
                progress.train_seconds += stretch.rounds.seconds
                if estimate is not None and (sentence := estimate.after(stretch)):
                    say(f"{run.spec.title}: {sentence}")
                if stretch.evaluation is not None:
                    result = stretch.evaluation.wait()
                    if result.seen or result.unseen:
                        of_group = result.seen or result.unseen
                        run.errors, run.shares = of_group.errors, of_group.shares
                    run.history.append(_evaluated(stretch, result, progress, config))
                    for each in callbacks:
                        if each.on_evaluation(run, run.history[-1]) and not run.stopped_by:
                            run.stopped_by = name_of(each)
                            progress.stopped = {"by": run.stopped_by, "rounds": config.rounds}
                    if run.stopped_by:
                        pipeline.end_with(stretch)
                progress.wall_seconds = time.monotonic() - began
                if stretch.copy is not None:
                    copy = stretch.copy.wait()
                    if config.prior_clients and stretch.last == config.prior_rounds:
                        progress.prior = copy
                    saver.save(progress, copy, stretch.ledger)
                for each in callbacks:
                    each.on_rounds(run)
            if not pipeline.works_on:  # on a CPU, no round starts before the last checkpoint is written
                saver.save_if_overdue(progress)
                saver.wait()
        saver.save_now(progress)
        ended = run.round == config.rounds or run.stopped_by
        if ended:
            yield  # other runs write their last checkpoints at the same time
        saver.wait()
        progress.wall_seconds = time.monotonic() - began
        if run.failure is not None:
            raise run.failure
        if not ended:
            raise Stopped(run.round, asked_to_stop[0])
    finally:
        saver.close()
    if run.round < config.rounds:
        say(f"{run.spec.title}: ended after round {run.round} of {config.rounds} by {run.stopped_by}")


def _saved(callbacks: Sequence[Callback], run: ActiveRun, round_: int) -> None:
    for each in callbacks:
        each.on_checkpoint(run, round_)


def _evaluated(stretch: Stretch, result: Evaluation, progress: Progress, config: Config) -> Row:
    """Return an evaluation as a row of the history, and update the best round in `progress`."""
    assert stretch.evaluation is not None
    progress.eval_seconds += stretch.evaluation.seconds
    # Without validation samples the last round is the best one.
    value = _goodness(result) if result.seen else float(progress.round)
    if value > progress.best_value or not progress.best_round:
        if progress.round % config.eval_every:  # only at the last round, whose evaluation an extended run drops
            progress.scheduled = Best(progress.best, progress.best_round, progress.best_value)
        progress.best_value, progress.best_round, progress.best = value, progress.round, stretch.state
    return {
        "round": progress.round,
        "seconds": round(progress.train_seconds, 3),
        "bytes_down": stretch.ledger.down,
        "bytes_up": stretch.ledger.up,
        "engine": progress.engines[-1][0],
        **result.rows(),
    }


def _goodness(result: Evaluation) -> float:
    """Return the first metric of the seen clients as a number that is better when larger."""
    first, value = result.seen._fields[0], float(result.seen[0])
    if math.isnan(value):
        return -MOST
    return min(MOST, max(-MOST, -value if first in result.seen.errors else value))


def local_steps(method: Method[Any], federation: Federation) -> float:
    """Return the number of gradients that a seen client computes in a round, on average."""
    if not method.local_epochs:
        return method.local_steps
    count = federation.count[TRAIN, : federation.num_seen]
    batches = count if not method.batch_size else (count + method.batch_size - 1) // method.batch_size
    return method.local_epochs * float(batches.double().mean())
