"""Checks whether a run may be trained into a folder, and locks the folder during training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from pefll.core.errors import PefllError
from pefll.core.files import is_temporary
from pefll.core.wording import argument
from pefll.models.spec import ModelSpec, check_same_model, spec_of_checkpoint
from pefll.runs import checkpoint, manifest
from pefll.runs.checksums import new_run
from pefll.runs.config import Config
from pefll.runs.fingerprints import Fingerprints, check_same_code
from pefll.runs.record import LOCK, RunFolder, last_round, rounds_of


def _unknown(rounds: int) -> Fingerprints:
    """Return no fingerprints, for a run whose code is not known yet."""
    del rounds
    return {}


def check_claim(
    folder: RunFolder | None,
    config: Config,
    model_spec: ModelSpec,
    fingerprints: Callable[[int], Fingerprints] = _unknown,
) -> None:
    """Raise PefllError if a folder holds another run, or this run with other settings, another model or other code.

    A folder without a round in a checkpoint and without an evaluation passes, because nothing is lost there.

    Args:
        folder: the run's folder; a run without one passes.
        config: the run's settings.
        model_spec: the spec of the run's model.
        fingerprints: see `ClaimingRun.fingerprints`.
    """
    if folder is None:
        return
    if folder.config_file.is_file():
        started = Config.load(folder.config_file, folder.trained_with())
        if not folder.is_untrained():
            _check_same(folder, started, config, model_spec, fingerprints)
    elif folder.path.exists() and (
        not folder.path.is_dir()
        or any(each.name != LOCK and not is_temporary(each.name) for each in folder.path.iterdir())
    ):
        raise PefllError(
            f"{folder.path} exists and is not a run folder; choose another {argument('out')}", code="PEFLL-T109"
        )


def _check_same(
    folder: RunFolder,
    started: Config,
    config: Config,
    model_spec: ModelSpec,
    fingerprints: Callable[[int], Fingerprints],
) -> None:
    """Raise PefllError if a folder's run was started with other settings than `config`, another model or other code."""
    try:
        started.check_same(config)
    except PefllError as error:  # name the folder: the user may have given one of several seeds
        raise PefllError(f"{folder.path}: {error.args[0]}", error.code) from error
    newest = manifest.newest(folder.checkpoints, folder.run_id())
    if newest:
        check_same_model(spec_of_checkpoint(newest.metadata, folder.path), model_spec, str(folder.path))
        advice = f"start a new run in another folder, with {argument('out')}"
        before = newest.metadata.get("fingerprints")  # none in a checkpoint of an earlier version
        check_same_code(before, fingerprints(started.rounds), folder.path, advice)


def _drop_untrained(folder: RunFolder, run: ClaimingRun) -> None:
    """Remove the files of a run without rounds, if it had other settings, another model or other code."""
    try:
        started = Config.load(folder.config_file, folder.trained_with())
        _check_same(folder, started, run.config, run.model_spec, run.fingerprints)
    except PefllError:
        folder.columns_file.unlink(missing_ok=True)
        shutil.rmtree(manifest.folder_of(folder.checkpoints, 0), ignore_errors=True)


def started_config(folder: RunFolder | None) -> Config | None:
    """Return the settings that the run in a folder was started with; None if the folder holds no run with rounds."""
    if folder is None or not folder.config_file.is_file() or folder.is_untrained():
        return None
    return Config.load(folder.config_file, folder.trained_with())


def finished_state(folder: RunFolder | None, rounds: int) -> checkpoint.Checkpoint | None:
    """Return the last state of a run that has finished `rounds` rounds; None if it is unfinished or damaged."""
    if folder is None:
        return None
    try:
        summary = folder.summary()
        rounds = last_round(summary, rounds)
        if summary is None or rounds_of(summary) < rounds or summary.get("split", "test") != "test":
            return None
        folder.history()
        folder.check_other_files()
        saved = checkpoint.latest(folder.checkpoints, lambda damage: None, folder.run_id())
    except PefllError:  # resuming the run reports and repairs the damage
        return None
    if folder.run_id() and not saved.names_run:  # resuming the run reports this
        return None
    return saved if saved.round >= rounds else None


class ClaimingRun(Protocol):
    """The attributes of a `RunSpec` that `claimed` needs."""

    @property
    def folder(self) -> RunFolder | None:
        """Its folder; None if it has none."""

    @property
    def config(self) -> Config:
        """Its settings."""

    @property
    def model_spec(self) -> ModelSpec:
        """The spec of its model."""

    def fingerprints(self, rounds: int) -> Fingerprints:
        """Return the fingerprints of its code, for the first `rounds` rounds."""


@contextmanager
def claimed(runs: Sequence[ClaimingRun], report: Callable[[str], None]) -> Iterator[None]:
    """Lock the folders of runs inside the block, and write their settings there; PefllError as in `check_claim`.

    All folders are locked before anything is written to one. A new run that ends without a checkpoint and without an
    evaluation leaves no folder behind. `report` gets a sentence for each folder that an earlier version wrote.
    """
    with_folder = [(run.folder, run) for run in runs if run.folder is not None]
    for folder, _ in with_folder:
        if age := folder.note_of_age():
            report(age)
    with ExitStack() as stack:
        for folder, _ in with_folder:
            stack.enter_context(folder.held())
        for folder, run in with_folder:
            check_claim(folder, run.config, run.model_spec, run.fingerprints)
            if not folder.config_file.is_file():
                stack.callback(folder.forget_untrained)
            elif folder.is_untrained():
                _drop_untrained(folder, run)
            checkpoint.sweep(folder.checkpoints)
            run_id = folder.run_id()
            if not run_id:
                run_id = new_run()
                folder.give_checks(run_id)  # before config.toml says that there are checks
                checkpoint.give_run(folder.checkpoints, run_id)
            run.config.save(folder.config_file, run_id)
        yield
