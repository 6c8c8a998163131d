"""Saves checkpoints of a run when they are due."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pefll.core.tree import Tree, named_leaves
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.device_queue import copy_to_host, fetched
from pefll.models.spec import ModelSpec
from pefll.runs.checkpoint import Writer
from pefll.runs.config import Config
from pefll.runs.fingerprints import Fingerprints
from pefll.runs.progress import SAVED, Progress
from pefll.runs.record import RunFolder


class Saver:
    """Decides when a checkpoint is due, and writes it. A run without a folder has no checkpoints.

    Args:
        engine: the run's engine.
        config: the run's settings.
        folder: the run's folder, or None.
        model_spec: the spec of the run's model, with which a checkpoint can be used without the data.
        round_: number of rounds done before.
        fingerprints: those of the run's code.
        on_checkpoint: called with the round of each checkpoint that is on disk.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        folder: RunFolder | None,
        model_spec: ModelSpec,
        round_: int,
        fingerprints: Fingerprints,
        on_checkpoint: Callable[[int], None] = lambda round_: None,
    ) -> None:
        self._engine, self._config, self._model_spec, self._folder = engine, config, model_spec, folder
        self._writer = Writer(folder.checkpoints, folder.sync_history, folder.go_on) if folder else None
        self._at, self._round = time.monotonic(), round_
        self._fingerprints = fingerprints
        self._on_checkpoint, self._under_way = on_checkpoint, -1

    def due(self, round_: int) -> bool:
        """Return whether to save the state after a round; PefllError if the last checkpoint could not be written."""
        if self._writer is None:
            return False
        if not self._writer.busy:  # frees its copy, so that the next copy reuses the pinned memory
            self.wait()
        by_number = round_ % self._config.checkpoint_every == 0 or round_ == self._config.rounds
        if by_number or self._overdue():
            self._at = time.monotonic()  # not due again while it is being written
            return True
        return False

    def _overdue(self) -> bool:
        """Return whether the last checkpoint is too old."""
        return self._writer is not None and time.monotonic() - self._at > 60 * self._config.checkpoint_minutes

    def save(self, progress: Progress, server: Tree, ledger: Ledger) -> None:
        """Begin to write a checkpoint.

        Args:
            progress: the run's progress, with all evaluations up to its round.
            server: the state after that round, in the host's memory.
            ledger: the bytes sent up to that round.
        """
        if self._writer is None:
            return
        device = self._engine.device
        # The best state is often this one, which is in the host's memory already.
        best = server if progress.best_round == progress.round else fetched(progress.best, device)
        parts = {"server": server, "best": best}
        metadata: dict[str, Any] = {"problem": self._model_spec.to_json(), "fingerprints": self._fingerprints}
        if progress.scheduled is not None:
            state, round_, value = progress.scheduled
            parts["scheduled"] = fetched(state, device)
            metadata["scheduled"] = {"round": round_, "value": value}
        if progress.prior is not None:
            parts["prior"] = progress.prior
        metadata["progress"] = {name: getattr(progress, name) for name in SAVED} | {"ledger": vars(ledger).copy()}
        tensors = {f"{part}.{name}": leaf for part, state in parts.items() for name, leaf in named_leaves(state)}
        history = None
        if self._folder is not None and (run := self._folder.run_id()):
            history, last = self._folder.history_to_keep(self._config.eval_every)
            metadata["run"] = {"id": run, "config": self._config.toml(), "history": last}
        self.wait()
        self._writer.begin(progress.round, tensors, metadata, history)
        self._at, self._round, self._under_way = time.monotonic(), progress.round, progress.round

    def save_now(self, progress: Progress) -> None:
        """Begin to write a checkpoint of a run without queued rounds, unless this round is saved already."""
        if self._round != progress.round or progress.round == 0:
            # The copy is made in the current stream, so after the work that computes the state.
            self.save(progress, copy_to_host(progress.server, self._engine.device).wait(), self._engine.ledger)

    def save_if_overdue(self, progress: Progress) -> None:
        """Call `save_now` if the last checkpoint is too old."""
        if self._overdue():
            self.save_now(progress)

    def wait(self) -> None:
        """Wait until the checkpoint is on disk, and call `on_checkpoint`; PefllError if it cannot be written."""
        if self._writer is not None:
            self._writer.wait()
            if self._under_way >= 0:
                round_, self._under_way = self._under_way, -1
                self._on_checkpoint(round_)

    def close(self) -> None:
        """Wait until nothing is being written; ignore errors, because the run ends anyway."""
        if self._writer is not None:
            self._writer.close()
