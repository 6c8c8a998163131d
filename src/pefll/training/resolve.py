"""From what a user asked for to a `RunSpec`, in which everything is decided: nobody asks again what `auto` means."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pefll.core.wording import counted
from pefll.data.federation import Federation
from pefll.engines.cohort import Engine
from pefll.engines.hardware import TO_READ, Hardware, check_memory, device_name, pick_hardware, pick_precision
from pefll.methods import build_method
from pefll.methods.contract import Method
from pefll.runs.checkpoint import Checkpoint
from pefll.runs.claim import check_claim, finished_state
from pefll.runs.config import Config
from pefll.runs.problem import describe_problem
from pefll.runs.record import RunFolder


@dataclass(frozen=True, eq=False)
class RunSpec:
    """A run with everything decided, before anything is opened. `resolve` makes it.

    Attributes:
        config: its settings, as they are written to config.toml.
        federation: who has what.
        model: the name of what clients run.
        facts: about the problem, for whoever reads a checkpoint or a personal model without the data.
        method: what is trained, bound to the problem.
        hardware: device, engine, precision, processes.
        clients_per_round: c.
        folder: where it is recorded; None for nowhere.
        finished: the last state in the folder, where nothing is left to do; else None.
        label: its name beside other runs; "" for its method and seed.
        tunes: whether it is there to choose hyper-parameters: then it ends with a score on the validation samples of
            seen clients, in place of the test.
        holds_out: whether its unseen clients are seen ones that were held out for that (`Federation.holding_out`), so
            that their validation samples are scored too.
        maps: whether its clients' descriptors are kept for the descriptor map.
    """

    config: Config
    federation: Federation
    model: str
    facts: dict[str, Any]
    method: Method[Any]
    hardware: Hardware
    clients_per_round: int
    folder: RunFolder | None = None
    finished: Checkpoint | None = None
    label: str = ""
    tunes: bool = False
    holds_out: bool = False
    maps: bool = True

    @property
    def title(self) -> str:
        """Its name while it is trained."""
        return self.label or f"{self.config.method} seed {self.config.seed}"

    @property
    def headline(self) -> str:
        """What it is about to do, in one line."""
        config, data, hardware = self.config, self.federation, self.hardware
        rounds = f"{counted(config.rounds, 'round')} of {counted(self.clients_per_round, 'client')}"
        precision = hardware.precision + (f" ({note})" if (note := self.precision_note) else "")
        untested = f" ({data.num_untested:,} without test samples)" if data.num_untested else ""
        return (
            f"{config.method} on {data.name}, {data.partition}: {data.num_seen} seen and {data.num_unseen} unseen "
            f"clients{untested}, model {self.model}, {rounds}, {device_name(hardware.device)}, {precision}"
            + (f", into {self.folder.path}" if self.folder else "")
        )

    @property
    def precision_note(self) -> str:
        """Why it does not have the precision that was asked for; "" where it has."""
        asked = self.config.precision
        return "" if asked in ("auto", self.hardware.precision) else f"only a GPU has {asked}"


def resolve(
    config: Config,
    federation: Federation,
    out: str | Path | None = None,
    *,
    model: str | nn.Module | None = None,
    runs: int = 1,
    label: str = "",
    tunes: bool = False,
    holds_out: bool = False,
) -> RunSpec:
    """Decide everything about a run that was left open.

    Args:
        config: what was asked for.
        federation: who has what.
        out: a folder for the run; None for none.
        model: an `nn.Module`, for a run whose model was given in Python; a name is taken from the config.
        runs: that are trained at once, for the memory that they take.
        label: see `RunSpec`.
        tunes: see `RunSpec`.
        holds_out: see `RunSpec`.

    Raises:
        PefllError: where it cannot be run here: another run's folder, too little memory, no such device.
    """
    config = dataclasses.replace(config, data_sha256=federation.fingerprint())
    problem, facts = describe_problem(federation, model if isinstance(model, nn.Module) else config.model)
    folder = None if out is None else RunFolder(Path(out))
    # Before engines are opened and memory is counted, so that a folder of another run is refused at once, and before
    # other runs' folders are made. Once more under the lock: somebody may have been there meanwhile.
    check_claim(folder, config, facts)
    kept = None if tunes else folder  # a search keeps scores and no weights
    finished = finished_state(kept, config.rounds)
    hardware = (
        TO_READ
        if finished
        else pick_hardware(problem, config.device, config.engine, config.precision, config.processes)
    )
    c = clients_per_round(config, federation)
    if finished is None:
        check_memory(hardware, config.method, config.settings, problem, federation, c, runs)
    method = build_method(config.method, problem, config.settings)
    if not method.trains_in_rounds:
        config = dataclasses.replace(config, rounds=0)
        finished = finished or finished_state(kept, 0)
    return RunSpec(
        config=config,
        federation=federation,
        model=facts["model"] or config.model,
        facts=facts,
        method=method,
        hardware=hardware,
        clients_per_round=c,
        folder=folder,
        finished=finished,
        label=label,
        tunes=tunes,
        holds_out=holds_out,
    )


def resolve_for(engine: Engine, config: Config, out: str | Path | None = None, maps: bool = True) -> RunSpec:
    """Return the spec of a run on an engine that is open already.

    Args:
        engine: reaches the clients.
        config: what was asked for.
        out: see `resolve`.
        maps: see `RunSpec`.
    """
    _, facts = describe_problem(engine.federation, config.model)
    if not engine.method.trains_in_rounds:
        config = dataclasses.replace(config, rounds=0)
    folder = None if out is None else RunFolder(Path(out))
    check_claim(folder, config, facts)
    precision = pick_precision(config.precision, engine.device)
    return RunSpec(
        config=config,
        federation=engine.federation,
        model=facts["model"],
        facts=facts,
        method=engine.method,
        hardware=Hardware(engine.device, engine.name, precision, engine.processes),
        clients_per_round=clients_per_round(config, engine.federation),
        folder=folder,
        maps=maps,
    )


def clients_per_round(config: Config, federation: Federation) -> int:
    """Return c: as asked for, or 5% of all clients as in the paper."""
    return config.clients_per_round or math.ceil(federation.num_clients / 20)
