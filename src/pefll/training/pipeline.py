"""Rounds, evaluations and copies of states, given to a device some stretches ahead of who records them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pefll.core.tree import Tree
from pefll.data.federation import VALIDATION
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.device_queue import DeviceFuture, copy_to_host, queue_of
from pefll.runs.progress import Progress
from pefll.runs.saver import Saver
from pefll.training.evaluation import Evaluation, Evaluator, evaluated_share
from pefll.training.resolve import RunSpec

STRETCH_SECONDS = 0.5  # so often the loop looks up: at the clock, at signals, at the bar
# So many stretches of rounds may be under way when the next is launched: a GPU has work while the host records. Several
# runs at once keep the host for longer than one stretch takes when they come to a checkpoint.
AHEAD = 2


@dataclass(frozen=True)
class Stretch:
    """Some rounds, under way or done.

    Attributes:
        first: rounds done before them.
        last: rounds done after them.
        rounds: to wait for; PefllError where training diverged.
        state: after them, where it is evaluated or saved.
        evaluation: of that state, where one is due.
        copy: of that state in the host's memory, where a checkpoint is due.
        ledger: what had crossed the client interface after them.
    """

    first: int
    last: int
    rounds: DeviceFuture[None]
    state: Tree
    evaluation: DeviceFuture[Evaluation] | None
    copy: DeviceFuture[Tree] | None
    ledger: Ledger

    def done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return all(part is None or part.done() for part in (self.rounds, self.evaluation, self.copy))


class Pipeline:
    """Launches stretches of rounds, each with what is due after it, and hands them out in order when they are done.

    On a CPU a stretch is done when it is launched. A GPU has up to `AHEAD` more to do meanwhile.

    Args:
        engine: does the rounds.
        spec: how many rounds, and when something is due.
        progress: where the run is; its server's state moves on with what is launched.
        saver: knows when a checkpoint is due.

    Attributes:
        works_on: whether the device goes on by itself while the host does something else.
    """

    def __init__(self, engine: Engine, spec: RunSpec, progress: Progress, saver: Saver) -> None:
        self._engine, self._queue = engine, queue_of(engine)
        self._config, self._method, self._progress, self._saver = spec.config, spec.method, progress, saver
        self._evaluator: Evaluator | None = None  # made when the first evaluation is due
        self._under_way: deque[Stretch] = deque()
        self._launched, self._size = progress.round, 1
        self.works_on = self._queue.works_on

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def launch(self) -> None:
        """Start the next rounds, then the evaluation and the copy of their state, where these are due."""
        config, progress, first = self._config, self._progress, self._launched
        due = ((first // every + 1) * every for every in (config.eval_every, config.checkpoint_every))
        last = min(first + self._size, config.rounds, *due)  # fewer rounds where something is due before
        evaluates = last % config.eval_every == 0 or last == config.rounds
        saves = self._saver.due(last)
        progress.server, rounds = self._queue.launch(progress.server, first, last - first)
        # Kept, because later rounds change the server's when this one is being written, or turns out to be the best.
        state = self._queue.snapshot(progress.server) if evaluates or saves else None
        if evaluates and self._evaluator is None:
            share = evaluated_share(self._engine, self._method, config)
            self._evaluator = Evaluator(self._engine, self._method, VALIDATION, share)
        with self._queue.beside():
            evaluation = self._evaluator.begin(state) if evaluates and self._evaluator else None
            copy = copy_to_host(state, self._engine.device) if saves else None
        self._under_way.append(Stretch(first, last, rounds, state, evaluation, copy, self._engine.ledger.copy()))
        self._launched = last

    def finished(self, asked_to_stop: Sequence[int]) -> Iterator[Stretch]:
        """Yield stretches whose rounds are done, and wait for them where nothing more is to be launched meanwhile.

        Args:
            asked_to_stop: the signals that came; with any, everything under way is waited for.
        """
        while self._under_way and (
            asked_to_stop
            or self._launched == self._config.rounds
            or len(self._under_way) > AHEAD
            or self._under_way[0].done()
        ):
            stretch = self._under_way.popleft()
            stretch.rounds.wait()
            yield stretch
            rounds = stretch.last - stretch.first
            seconds = stretch.rounds.seconds / rounds
            self._size = max(1, min(4 * rounds, int(STRETCH_SECONDS / max(seconds, 1e-9))))

    def end_with(self, stretch: Stretch) -> None:
        """Forget what was launched after a stretch that has an evaluation: the run ends with its state."""
        self._under_way.clear()
        self._launched, self._progress.server = stretch.last, stretch.state
        vars(self._engine.ledger).update(vars(stretch.ledger))
