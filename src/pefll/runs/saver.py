"""When a run's checkpoints are due, and what is in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pefll.core.tree import Tree, named_leaves
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.device_queue import copy_to_host, fetched
from pefll.runs.checkpoint import Writer
from pefll.runs.config import Config
from pefll.runs.progress import Progress
from pefll.runs.record import RunFolder

CHECKPOINT_SECONDS = 300.0


class Saver:
    """Says when a checkpoint is due, and has it written; for a run without a folder, never.

    Args:
        engine: of the run.
        config: how often.
        folder: of the run; None for nowhere.
        facts: about the problem, for whoever reads a checkpoint without the data.
        round_: that the run begins with.
        on_checkpoint: is told of each round whose checkpoint is on the disk.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        folder: RunFolder | None,
        facts: dict[str, Any],
        round_: int,
        on_checkpoint: Callable[[int], None] = lambda round_: None,
    ) -> None:
        self._engine, self._config, self._facts, self._folder = engine, config, facts, folder
        self._writer = Writer(folder.checkpoints, folder.sync_history, folder.go_on) if folder else None
        self._at, self._round = time.monotonic(), round_
        self._on_checkpoint, self._under_way = on_checkpoint, -1

    def due(self, round_: int) -> bool:
        """Return whether the state after a round, which is about to be launched, is to be saved.

        Raises:
            PefllError: where it has turned out meanwhile that the last one cannot be written.
        """
        if self._writer is None:
            return False
        if not self._writer.busy:  # before the next copy, too: a GPU's are made in memory that takes long to get
            self.wait()
        by_number = round_ % self._config.checkpoint_every == 0 or round_ == self._config.rounds
        if by_number or self._overdue():
            self._at = time.monotonic()  # it is not due again while it is under way
            return True
        return False

    def _overdue(self) -> bool:
        """Return whether the last one was begun too long ago."""
        return self._writer is not None and time.monotonic() - self._at > CHECKPOINT_SECONDS

    def save(self, progress: Progress, server: Tree, ledger: Ledger) -> None:
        """Begin to write how far a run is.

        Args:
            progress: with everything recorded until its round.
            server: the state after that round, in the host's memory.
            ledger: what had crossed the client interface after it.
        """
        if self._writer is None:
            return
        device = self._engine.device
        # Often the best state is this very one, which is here already.
        best = server if progress.best_round == progress.round else fetched(progress.best, device)
        parts = {"server": server, "best": best}
        facts: dict[str, Any] = {"problem": self._facts}
        if progress.scheduled is not None:
            state, round_, value = progress.scheduled
            parts["scheduled"] = fetched(state, device)
            facts["scheduled"] = {"round": round_, "value": value}
        facts["progress"] = {
            "best_round": progress.best_round,
            "best_value": progress.best_value,
            "train_seconds": progress.train_seconds,
            "eval_seconds": progress.eval_seconds,
            "wall_seconds": progress.wall_seconds,
            "lockstep": progress.lockstep,
            "engines": progress.engines,
            "ledger": vars(ledger).copy(),
        }
        tensors = {f"{part}.{name}": leaf for part, state in parts.items() for name, leaf in named_leaves(state)}
        history = None
        if self._folder is not None and (run := self._folder.run_id()):
            history, last = self._folder.history_to_keep(self._config.eval_every)
            facts["run"] = {"id": run, "config": self._config.toml(), "history": last}
        self.wait()
        self._writer.begin(progress.round, tensors, facts, history)
        self._at, self._round, self._under_way = time.monotonic(), progress.round, progress.round

    def save_now(self, progress: Progress) -> None:
        """Begin to write how far a run is that has nothing under way, unless that is saved already."""
        if self._round != progress.round or progress.round == 0:
            # In the current stream: after all that the states come from.
            self.save(progress, copy_to_host(progress.server, self._engine.device).wait(), self._engine.ledger)

    def save_if_overdue(self, progress: Progress) -> None:
        """Do as `save_now` where the last one was begun too long ago."""
        if self._overdue():
            self.save_now(progress)

    def wait(self) -> None:
        """Return when everything is on the disk; PefllError where it cannot be written."""
        if self._writer is not None:
            self._writer.wait()
            self._tell()

    def _tell(self) -> None:
        """Tell of a checkpoint that is on the disk since the last call."""
        if self._under_way >= 0:
            round_, self._under_way = self._under_way, -1
            self._on_checkpoint(round_)

    def close(self) -> None:
        """Let what is being written be finished."""
        if self._writer is not None:
            self._writer.close()
