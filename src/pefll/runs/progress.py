"""How far a run is, written to checkpoints and read from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.tree import Tree, from_named, map_tree, named_leaves
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.device_queue import queue_of
from pefll.runs import checkpoint, manifest
from pefll.runs.config import Config
from pefll.runs.record import RunFolder


class Best(NamedTuple):
    """A best round: see `Progress`."""

    state: Tree
    round: int
    value: float


@dataclass
class Progress:
    """Where a run is: with the federation and the config, all that the rest of the run depends on.

    Attributes:
        round: rounds done.
        server: the method's state.
        best: the state at the best round.
        best_round: the round with the best seen-client validation accuracy so far.
        best_value: that accuracy; -1 before the first evaluation.
        train_seconds: spent in rounds; on a GPU with the time that other runs, and this one's evaluations, took away.
        eval_seconds: spent in evaluations; on a GPU beside rounds, so that it is no share of anything.
        wall_seconds: by the clock, with everything: compiling, recording, waiting for other runs.
        lockstep: the most runs that were trained together with this one, itself included.
        scheduled: the best that `eval_every` asked for, where an evaluation that only the end of the run asked for was
            better: a longer run, which this may become, has no such evaluation.
        engines: which engine did the rounds, each as (its name, rounds done before it); the last one goes on.
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

    def take_over(self, engine: str) -> str:
        """Note which engine does the rounds from here on; return which one did those before, where it was another."""
        before = self.engines[-1][0] if self.engines else ""
        if before != engine:
            self.engines.append((engine, self.round))
        return "" if before == engine else before


def start_or_resume(
    engine: Engine, config: Config, folder: RunFolder | None, say: Callable[[str], None]
) -> tuple[Progress, list[dict[str, Any]]]:
    """Return how far a run is, and its evaluations until then. Its folder keeps nothing of what comes after that.

    Args:
        engine: reaches the clients.
        config: the run's settings.
        folder: of the run; None if it has none.
        say: gets a sentence for what is unusual.
    """
    progress, copy = resume(engine, folder, say) or (_begin(engine), None)
    if before := progress.take_over(engine.name):
        say(f"rounds up to {progress.round} were done by the engine {before}; {engine.name} goes on with them")
    between = progress.round < config.rounds and progress.round % config.eval_every != 0
    if between and progress.scheduled is not None:  # the run ended here, and is being extended
        progress.best, progress.best_round, progress.best_value = progress.scheduled
        progress.scheduled = None
    if folder is None:
        return progress, []
    # Also where a run was stopped before its first checkpoint. The evaluation where it ended before goes too, but
    # not where that one's state is the best: checkpoints of earlier versions have no other.
    gone = between and progress.best_round < progress.round
    if progress.round == 0 and os.path.lexists(folder.history_file) and config.rounds:
        say(f"{folder.path} has no checkpoint: the run starts anew")
    history = folder.keep_history_until(progress.round - gone, copy, say)
    # Of a run that is being extended; not before, so that one that cannot go on keeps its results.
    folder.put_summary_away(say)
    return progress, history


def _begin(engine: Engine) -> Progress:
    server = engine.start()
    return Progress(round=0, server=server, best=queue_of(engine).snapshot(server))


def resume(
    engine: Engine, folder: RunFolder | None, say: Callable[[str], None]
) -> tuple[Progress, bytes | None] | None:
    """Return how far the run in a folder is, and its evaluations until then; None for one that has not begun."""
    if folder is None or not manifest.newest_first(folder.checkpoints):
        return None
    saved = checkpoint.latest(folder.checkpoints, say, folder.run_id())
    checkpoint.set_newer_aside(folder.checkpoints, saved.round, say)
    check_progress(saved.facts, folder.path)
    numbers = dict(saved.facts["progress"])
    template = engine.start()
    vars(engine.ledger).update(numbers.pop("ledger"))  # after `start`, whose exchange it already counts
    scheduled = saved.facts.get("scheduled")
    numbers["engines"] = [(str(name), int(first)) for name, first in numbers.get("engines", [])]
    numbers.setdefault("wall_seconds", numbers["train_seconds"] + numbers["eval_seconds"])  # of an earlier version
    progress = Progress(
        round=saved.round,
        server=restore(template, saved.tensors, "server"),
        best=restore(template, saved.tensors, "best"),
        scheduled=Best(restore(template, saved.tensors, "scheduled"), **scheduled) if scheduled else None,
        **numbers,
    )
    return progress, saved.history


_COUNTS = ("best_round", "lockstep")
_SECONDS = ("train_seconds", "eval_seconds", "wall_seconds")


def check_progress(facts: dict[str, Any], where: object) -> None:
    """Raise PefllError where a checkpoint's facts do not say how far its run is.

    Args:
        facts: of the checkpoint.
        where: the run, for the sentence.
    """
    numbers, scheduled = facts.get("progress"), facts.get("scheduled")
    makes_sense = (
        isinstance(numbers, dict)
        and {"best_round", "best_value", "train_seconds", "eval_seconds", "ledger"} <= numbers.keys()
        and numbers.keys() <= {*_COUNTS, *_SECONDS, "best_value", "engines", "ledger"}
        and all(_is_count(numbers.get(name, 0)) for name in _COUNTS)
        and all(_is_number(numbers.get(name, 0)) for name in ("best_value", *_SECONDS))
        and _are_engines(numbers.get("engines", []))
        and isinstance(numbers["ledger"], dict)
        and numbers["ledger"].keys() <= vars(Ledger()).keys()
        and all(map(_is_count, numbers["ledger"].values()))
        and (not scheduled or _is_scheduled(scheduled))
    )
    if not makes_sense:
        raise PefllError(
            f"the newest checkpoint of {where} is damaged: its progress makes no sense; put back the one that was "
            "there",
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


def _is_scheduled(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"round", "value"}
        and _is_count(value["round"])
        and _is_number(value["value"])
    )


def restore(template: Tree, tensors: dict[str, Tensor], part: str) -> Tree:
    """Return a state shaped as `template` from the tensors of a checkpoint; PefllError where it is of another model."""
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
    # Copied into memory of torch's own: numbers at odd addresses would be rounded differently on a CPU.
    return map_tree(lambda old, new: torch.empty_like(old).copy_(new), template, from_named(template, chosen))
