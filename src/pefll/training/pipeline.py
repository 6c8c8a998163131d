"""Launches rounds, evaluations and copies of states before the loop records their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pefll.core.tree import Tree
from pefll.data.samples import VALIDATION
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.device_queue import DeviceFuture, copy_to_host, queue_of
from pefll.runs.progress import Progress
from pefll.runs.saver import Saver
from pefll.training.evaluation import Evaluator, evaluated_share
from pefll.training.figures import Evaluation
from pefll.training.resolve import RunSpec

STRETCH_SECONDS = 0.5  # the loop reads signals and updates the progress bar this often
# Number of stretches that may be under way when the next one is launched, so that a GPU has work while the host
# records results. One is too few: with several runs, a checkpoint can take the host longer than one stretch.
AHEAD = 2


@dataclass(frozen=True)
class Stretch:
    """A stretch of consecutive rounds, under way or done.

    Attributes:
        first: number of rounds done before the stretch.
        last: number of rounds done after the stretch.
        rounds: the rounds as a future; its `wait` raises PefllError if training diverged.
        state: the state after the last round, if it is evaluated or saved; else None.
        evaluation: the evaluation of the state, if one is due.
        copy: a copy of the state in the host's memory, if a checkpoint is due, or if this is the prior.
        ledger: the run's bytes and exchanges up to the last round.
    """

    first: int
    last: int
    rounds: DeviceFuture[None]
    state: Tree
    evaluation: DeviceFuture[Evaluation] | None
    copy: DeviceFuture[Tree] | None
    ledger: Ledger

    def done(self) -> bool:
        """Return whether the rounds, the evaluation and the copy are done."""
        return all(part is None or part.done() for part in (self.rounds, self.evaluation, self.copy))


class Pipeline:
    """Launches stretches of rounds, evaluations and copies of states, and yields the stretches in order when done.

    On a CPU, a stretch is done when `launch` returns. On a GPU, up to `AHEAD` more stretches are under way.

    Args:
        engine: runs the rounds.
        spec: the run's spec.
        progress: the run's progress; its `server` is the state after the last launched round.
        saver: knows when a checkpoint is due.

    Attributes:
        works_on: whether the device continues to work while the host does something else.
    """

    def __init__(self, engine: Engine, spec: RunSpec, progress: Progress, saver: Saver) -> None:
        self._engine, self._queue = engine, queue_of(engine)
        self._config, self._method, self._progress, self._saver = spec.config, spec.method, progress, saver
        self._evaluator: Evaluator | None = None  # made for the first evaluation
        self._under_way: deque[Stretch] = deque()
        self._launched, self._size = progress.round, 1
        self.works_on = self._queue.works_on
        self._prior_rounds = spec.config.prior_rounds if spec.config.prior_clients else 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def launch(self) -> None:
        """Launch the next rounds, then the evaluation and the copy of their state if they are due."""
        config, progress, first = self._config, self._progress, self._launched
        due = ((first // every + 1) * every for every in (config.eval_every, config.checkpoint_every))
        last = min(first + self._size, config.rounds, *due)  # fewer if something is due before
        if first < self._prior_rounds:
            last = min(last, self._prior_rounds)
        evaluates = last % config.eval_every == 0 or last == config.rounds
        saves = self._saver.due(last) or last == self._prior_rounds
        progress.server, rounds = self._queue.launch(progress.server, first, last - first)
        # A snapshot, because later rounds may overwrite the state before it is saved, or while it is the best one.
        state = self._queue.snapshot(progress.server) if evaluates or saves else None
        if evaluates and self._evaluator is None:
            share = evaluated_share(self._engine, self._method, config)
            self._evaluator = Evaluator(self._engine, self._method, VALIDATION, share)
        with self._queue.beside():
            evaluation = self._evaluator.begin(state) if evaluates and self._evaluator else None
            copy = copy_to_host(state, self._engine.device) if saves else None
        self._under_way.append(Stretch(first, last, rounds, state, evaluation, copy, self._engine.ledger.copy()))
        self._launched = last

    def finished(self, ends: Callable[[], bool]) -> Iterator[Stretch]:
        """Yield stretches whose rounds are done. Wait for them if nothing more is launched, as `ends` also says."""
        while self._under_way and (
            ends() or self._launched == self._config.rounds or len(self._under_way) > AHEAD or self._under_way[0].done()
        ):
            stretch = self._under_way.popleft()
            stretch.rounds.wait()
            yield stretch
            rounds = stretch.last - stretch.first
            seconds = stretch.rounds.seconds / rounds
            self._size = max(1, min(4 * rounds, int(STRETCH_SECONDS / max(seconds, 1e-9))))

    def end_with(self, stretch: Stretch) -> None:
        """End the run with the state of an evaluated stretch, and drop everything launched after it."""
        self._under_way.clear()
        self._launched, self._progress.server = stretch.last, stretch.state
        vars(self._engine.ledger).update(vars(stretch.ledger))
