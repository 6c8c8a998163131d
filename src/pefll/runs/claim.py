"""The folder that a run is trained into: whose it is, whether its run is finished, and nobody else's meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import is_temporary
from pefll.core.wording import argument
from pefll.models.facts import check_problem
from pefll.models.probe import check_same_model
from pefll.runs import checkpoint, manifest
from pefll.runs.checksums import new_run
from pefll.runs.config import Config
from pefll.runs.record import LOCK, RunFolder, last_round, rounds_of


def check_claim(folder: RunFolder | None, config: Config, facts: dict[str, Any]) -> None:
    """Raise PefllError where a folder is not the same run's, with the same settings and model.

    Args:
        folder: that the run wants; None for none.
        config: its settings.
        facts: about its problem.
    """
    if folder is None:
        return
    if folder.config_file.is_file():
        started = Config.load(folder.config_file, folder.trained_with())
        try:
            started.check_same(config)
        except PefllError as error:  # where several runs have folders of their own, the user named none of them
            raise PefllError(f"{folder.path}: {error.args[0]}", error.code) from error
        newest = manifest.newest(folder.checkpoints, folder.run_id())
        if newest:
            check_problem(newest.facts.get("problem"), folder.path)
            check_same_model(newest.facts["problem"], facts, str(folder.path))
    elif folder.path.exists() and (
        not folder.path.is_dir()
        or any(each.name != LOCK and not is_temporary(each.name) for each in folder.path.iterdir())
    ):
        raise PefllError(
            f"{folder.path} exists and is not a run folder; choose another {argument('out')}", code="PEFLL-T109"
        )


def finished_state(folder: RunFolder | None, rounds: int) -> checkpoint.Checkpoint | None:
    """Return a run's last state where it has its results and that state is whole: then nothing is left to do.

    Args:
        folder: of the run; None for none.
        rounds: that it is to have.
    """
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
    except PefllError:  # to be said, and mended, by who goes on from there
        return None
    return saved if saved.round >= rounds else None


@contextmanager
def held(folder: RunFolder | None) -> Iterator[None]:
    """Keep everybody else from training into a folder inside the block; None for a run that is not kept."""
    if folder is None:
        yield
        return
    with folder.held():
        yield


def claim(folder: RunFolder | None, config: Config, facts: dict[str, Any]) -> None:
    """Write what was asked for into a folder that is held; see `check_claim`."""
    if folder is None:
        return
    check_claim(folder, config, facts)
    checkpoint.sweep(folder.checkpoints)
    run = folder.run_id()
    if not run:
        run = new_run()
        folder.give_checks(run)  # before the settings say that there are some
    config.save(folder.config_file, run)
