"""The progress of a run: its state between rounds, which checkpoints restore."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.files import set_aside
from pefll.core.tree import Tree, from_named, map_tree, named_leaves
from pefll.data.npz import read_npz
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.device_queue import queue_of
from pefll.runs import checkpoint, manifest
from pefll.runs.config import Config
from pefll.runs.record import RunFolder

# The fields of `Progress` that a manifest holds: see `check_progress`.
SAVED = ("best_round", "best_value", "train_seconds", "eval_seconds", "wall_seconds", "lockstep", "engines", "stopped")


class Best(NamedTuple):
    """The state of a method at a best round, the round, and its accuracy; see `Progress`."""

    state: Tree
    round: int
    value: float


@dataclass
class Progress:
    """The state of a run. Together with the federation and the config, it decides the rest of the run.

    Attributes:
        round: number of rounds done.
        server: the method's state.
        best: the state at the best round.
        best_round: the round with the best seen-client validation accuracy so far.
        best_value: that accuracy; -1 before the first evaluation.
        train_seconds: seconds in rounds; on a GPU this includes other runs and evaluations.
        eval_seconds: seconds in evaluations; a GPU does them during rounds.
        wall_seconds: all seconds, also of compiling, capturing and waiting for other runs.
        lockstep: the largest number of runs that were trained together, including this one.
        scheduled: the best round due by `eval_every`, if the evaluation at the end of the run was better. It is kept
            because an extended run does not have that last evaluation.
        stopped: the callback that stopped the run and the rounds that it should have had, as {"by": name, "rounds": T};
            empty if none did.
        engines: (name, number of rounds before it) of each engine that did rounds; the last engine continues.
        prior: the state after the rounds with some of the clients only, in the host's memory; None if there is none.
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
    engines: list[tuple[str, int]] = field(default_factory=list)
    prior: Tree | None = None
    stopped: dict[str, Any] = field(default_factory=dict)

    def take_over(self, engine: str) -> str:
        """Set the engine of the next rounds, and return the name of the previous engine; empty if it is the same."""
        before = self.engines[-1][0] if self.engines else ""
        if before != engine:
            self.engines.append((engine, self.round))
        return "" if before == engine else before


def start_or_resume(
    engine: Engine, config: Config, folder: RunFolder | None, say: Callable[[str], None]
) -> tuple[Progress, list[dict[str, Any]]]:
    """Return the progress and the evaluations of a new or resumed run.

    Its folder loses the evaluations after its last checkpoint. `say` gets a sentence for everything unusual.
    """
    resumed = resume(engine, folder, say)
    progress, copy = resumed or (_begin(engine), None)
    if before := progress.take_over(engine.name):
        say(f"the engine {before} did the first {progress.round} rounds; {engine.name} continues")
    if progress.stopped.get("rounds") != config.rounds:  # a stopped run that is given more rounds continues
        progress.stopped = {}
    between = progress.round < config.rounds and progress.round % config.eval_every != 0
    if between and progress.scheduled is not None:  # the run had ended here, and is being extended
        progress.best, progress.best_round, progress.best_value = progress.scheduled
        progress.scheduled = None
    if folder is None:
        return progress, []
    # An extended run drops the evaluation at its former end, unless the state there is the best one: checkpoints of
    # earlier versions have no other best state.
    gone = between and progress.best_round < progress.round
    if resumed is None:
        folder.set_results_aside(say)
    history = folder.keep_history_until(progress.round - gone, copy, say)
    # Last, so that a run that cannot be extended keeps its results.
    _put_descriptors_away(folder, say)
    folder.put_summary_away(say)
    return progress, history


def _put_descriptors_away(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Rename descriptors that are damaged or of another run. At its end the run replaces its own descriptors."""
    path = folder.descriptors_file
    if not os.path.lexists(path):
        return
    own = folder.are_own_descriptors()
    if own is None:
        try:
            run = read_npz(path, (), ("run",)).get("run")  # descriptors of an earlier version name no run
            own = run is None or str(run) == folder.run_id()
        except PefllError:
            own = False
    if not own:
        say(f"{path} is damaged or of another run; it is kept as {set_aside(path).name}")


def _begin(engine: Engine) -> Progress:
    server = engine.start()
    return Progress(round=0, server=server, best=queue_of(engine).snapshot(server))


def resume(
    engine: Engine, folder: RunFolder | None, say: Callable[[str], None]
) -> tuple[Progress, bytes | None] | None:
    """Return the progress in a folder's last checkpoint, and its copy of history.jsonl; None without a checkpoint."""
    if folder is None or not manifest.newest_first(folder.checkpoints):
        return None
    saved = checkpoint.latest(folder.checkpoints, say, folder.run_id())
    checkpoint.set_newer_aside(folder.checkpoints, saved.round, say)
    check_progress(saved.metadata, folder.path)
    numbers = dict(saved.metadata["progress"])
    template = engine.start()
    vars(engine.ledger).update(numbers.pop("ledger"))  # after `start`, which counts its own bytes
    scheduled = saved.metadata.get("scheduled")
    numbers["engines"] = [(str(name), int(first)) for name, first in numbers.get("engines", [])]
    numbers.setdefault("wall_seconds", numbers["train_seconds"] + numbers["eval_seconds"])  # earlier versions lack it
    progress = Progress(
        round=saved.round,
        server=restore(template, saved.tensors, "server"),
        best=restore(template, saved.tensors, "best"),
        scheduled=Best(restore(template, saved.tensors, "scheduled"), **scheduled) if scheduled else None,
        prior=restore_prior(template, saved.tensors),
        **numbers,
    )
    return progress, saved.history


def check_progress(metadata: dict[str, Any], where: object) -> None:
    """Raise PefllError if the progress in a checkpoint's metadata makes no sense; `where` names the run."""
    numbers, scheduled = metadata.get("progress"), metadata.get("scheduled")
    makes_sense = (
        isinstance(numbers, dict)
        and {"best_round", "best_value", "train_seconds", "eval_seconds", "ledger"} <= numbers.keys()
        and numbers.keys() <= {*SAVED, "ledger"}
        and all(_is_count(numbers.get(name, 0)) for name in ("best_round", "lockstep"))
        and all(
            _is_number(numbers.get(name, 0)) for name in ("best_value", "train_seconds", "eval_seconds", "wall_seconds")
        )
        and _are_engines(numbers.get("engines", []))
        and _is_stopped(numbers.get("stopped", {}))
        and isinstance(numbers["ledger"], dict)
        and numbers["ledger"].keys() <= vars(Ledger()).keys()
        and all(map(_is_count, numbers["ledger"].values()))
        and (not scheduled or _is_scheduled(scheduled))
    )
    if not makes_sense:
        raise PefllError(
            f"the newest checkpoint of {where} is damaged: its progress makes no sense; restore it from a copy",
            code="PEFLL-R021",
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


def _are_engines(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and _is_count(each[1]) for each in value
    )


def _is_stopped(value: Any) -> bool:
    return value == {} or (
        isinstance(value, dict)
        and value.keys() == {"by", "rounds"}
        and isinstance(value["by"], str)
        and _is_count(value["rounds"])
    )


def _is_scheduled(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"round", "value"}
        and _is_count(value["round"])
        and _is_number(value["value"])
    )


def restore_prior(template: Tree, tensors: dict[str, Tensor]) -> Tree | None:
    """Return the prior of a checkpoint; None if it has none, as before the last round of the prior."""
    return restore(template, tensors, "prior") if any(name.startswith("prior.") for name in tensors) else None


def restore(template: Tree, tensors: dict[str, Tensor], part: str) -> Tree:
    """Return a state like `template` from the tensors of a checkpoint; PefllError if they do not fit."""
    chosen = {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
    for name, old in named_leaves(template):
        if name not in chosen:
            raise PefllError(
                f"the checkpoint has no {part}.{name}: the run was trained with another method or model",
                code="PEFLL-R016",
            )
        if chosen[name].shape != old.shape:
            shapes = f"shape {list(chosen[name].shape)}, not {list(old.shape)}"
            raise PefllError(
                f"the checkpoint's {name} has {shapes}: the run was trained with another model or clients",
                code="PEFLL-T124",
            )
    # Copies, because they are aligned: a CPU rounds sums of unaligned numbers differently.
    return map_tree(lambda old, new: torch.empty_like(old).copy_(new), template, from_named(template, chosen))
