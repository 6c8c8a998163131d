"""Pictures of a run in memory: those that `pefll show` draws of run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError, unknown
from pefll.core.tree import Tree, map_tree
from pefll.data.federation import Federation
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import open_engine, pick_hardware
from pefll.methods.contract import Method
from pefll.report.plots import check_drawable, draw_curves, draw_descriptors
from pefll.report.runs import run_in_memory
from pefll.runs.config import Config
from pefll.training.summary import MAP_CLIENTS, described

PICTURES = ("curves", "descriptors")


def check_picture(out: Path, what: str) -> None:
    """Raise PefllError if there is no such picture, or if it cannot be drawn into this file."""
    if what not in PICTURES:
        raise unknown("picture", what, PICTURES)
    check_drawable(out)


def plot_curves(config: Config, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], out: Path) -> None:
    """Draw the validation curves of a run."""
    draw_curves([run_in_memory(config, history, summary)], out)


def plot_descriptors(method: Method[Any], server: Tree, config: Config, federation: Federation, out: Path) -> None:
    """Draw the map of the clients' descriptors, made from the method's state."""
    hardware = pick_hardware(method.problem, config.device, config.engine, config.precision, config.processes)
    with open_engine(hardware, federation, method, config.seed, 0) as engine, queue_of(engine).turn():
        found = described(engine, method, map_tree(lambda leaf: leaf.to(engine.device), server), federation)
    if found is None:
        why = f"{config.method} has none"
        if federation.num_clients > MAP_CLIENTS:
            why = f"{federation.num_clients:,} clients are too many, the most are {MAP_CLIENTS:,}"
        raise PefllError(f"there is no map of descriptors: {why}; draw the curves", code="PEFLL-T635")
    draw_descriptors(found, out)
