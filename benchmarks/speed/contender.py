"""The contenders: their names, their modules and the packages they need.

The module of a contender has a function `run(work, turns, **options)`. It prepares everything, then does as many rounds
as each item of `turns` says. It returns the final weights [D], or None if it has none. The time between two items is a
turn. The time before the first item is preparation and not counted.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.speed.setting import Work
from pefll.runs.config import PRECISIONS

INSTALL = "not installed: pip install -e '.[bench]'"


@dataclass(frozen=True)
class Contender:
    """A program that runs rounds.

    Attributes:
        name: name on the command line and in the record.
        label: name in tables.
        module: module with its function `run`.
        device: cpu or cuda.
        method: fedavg or pefll.
        options: options of `run`.
        needs: packages that must be installed.
    """

    name: str
    label: str
    module: str
    device: str = "cpu"
    method: str = "fedavg"
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        """Whether a needed package is not installed."""
        return any(importlib.util.find_spec(package) is None for package in self.needs)

    def run(self, work: Work, turns: Iterable[int]) -> Tensor | None:
        """Do the rounds of each turn and return the final weights [D]."""
        module = importlib.import_module(f"benchmarks.speed.{self.module}")
        weights: Tensor | None = module.run(work, turns, **self.options)
        return weights


def contenders(cores: int, cuda: bool) -> list[Contender]:
    """Return all contenders of a machine, including other software that is not installed.

    Args:
        cores: number of cores that this process may use.
        cuda: whether there is a GPU.
    """
    everybody = [one for method in ("fedavg", "pefll") for one in _ours(method, cores, cuda)]
    everybody += [Contender("plain-cpu", "plain PyTorch loop", "plain")]
    everybody += _others("cpu", actors=cores)
    if cuda:
        everybody += [Contender("plain-cuda", "plain PyTorch loop, GPU", "plain", "cuda", options={"device": "cuda"})]
        everybody += _others("cuda", actors=min(4, cores))
    return everybody


def _ours(method: str, cores: int, cuda: bool) -> list[Contender]:
    """Return our engines with one method: serial on one core and on all, vector, and on the GPU in each precision."""
    label = f"ours, {'FedAvg' if method == 'fedavg' else 'PeFLL'}"

    def one(name: str, text: str, **options: Any) -> Contender:
        device = str(options.get("device", "cpu"))
        return Contender(f"{method}-{name}", f"{label}, {text}", "ours", device, method, {"method": method} | options)

    found = [one("serial-1", "serial", engine="serial", processes=1)]
    if cores > 1:
        found.append(one("serial-all", f"serial, {cores} processes", engine="serial", processes=cores))
    found.append(one("vector-cpu", "vector on the CPU", engine="vector"))
    for precision in PRECISIONS if cuda else ():
        if precision != "float64":  # float64 is only for tests
            text = f"vector, {precision}"
            found.append(one(f"vector-{precision}", text, engine="vector", device="cuda", precision=precision))
    return found


def _others(device: str, actors: int) -> list[Contender]:
    """Return `vmap` and other simulators on a device."""
    where = ", GPU" if device == "cuda" else ""
    options = {"device": device}
    text = f"Flower simulation, {actors} actors{where}"
    return [
        Contender(f"vmap-{device}", f"torch.func.vmap without graphs{where}", "vmapped", device, options=options),
        Contender(f"pfl-{device}", f"pfl-research{where}", "peer_pfl", device, options=options, needs=("pfl",)),
        Contender(
            f"flower-{device}", text, "peer_flower", device, options=options | {"actors": actors}, needs=("flwr", "ray")
        ),
    ]
