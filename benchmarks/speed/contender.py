"""Who races: each contender is a module with a function `run`, and here is what each is called and needs.

`run(work, turns, **options)` prepares everything, then does as many rounds as each item of `turns` says, and returns
the weights it ended with, [D] (None where it has no such weights). What happens between two items is a turn and is
timed; what happens before the first item is preparation.
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

INSTALL = "not installed: pip install 'pefll[bench]'"


@dataclass(frozen=True)
class Contender:
    """One way to run rounds.

    Attributes:
        name: what it is called on the command line and in the record.
        label: what it is called in tables.
        module: where its `run` is.
        device: cpu or cuda.
        method: fedavg or pefll.
        options: for `run`.
        needs: packages that must be there.
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
        """Whether a package that it needs is not installed."""
        return any(importlib.util.find_spec(package) is None for package in self.needs)

    def run(self, work: Work, turns: Iterable[int]) -> Tensor | None:
        """Do the rounds of each turn and return the weights at the end, [D]."""
        module = importlib.import_module(f"benchmarks.speed.{self.module}")
        weights: Tensor | None = module.run(work, turns, **self.options)
        return weights


def contenders(cores: int, cuda: bool) -> list[Contender]:
    """Return everybody who can race on a machine, peers that are not installed included.

    Args:
        cores: how many this process may use.
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
    """Return our engines with one method: on one core, on all, vectorised, and on the GPU in each precision."""
    label = f"ours, {'FedAvg' if method == 'fedavg' else 'PeFLL'}"

    def one(name: str, text: str, **options: Any) -> Contender:
        device = str(options.get("device", "cpu"))
        return Contender(f"{method}-{name}", f"{label}, {text}", "ours", device, method, {"method": method} | options)

    found = [one("serial-1", "serial", engine="serial", processes=1)]
    if cores > 1:
        found.append(one("serial-all", f"serial, {cores} processes", engine="serial", processes=cores))
    found.append(one("vector-cpu", "vector on the CPU", engine="vector"))
    for precision in PRECISIONS if cuda else ():
        if precision != "float64":  # a reference for tests, which no run uses
            text = f"vector, {precision}"
            found.append(one(f"vector-{precision}", text, engine="vector", device="cuda", precision=precision))
    return found


def _others(device: str, actors: int) -> list[Contender]:
    """Return `vmap` and the peers on a device."""
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
