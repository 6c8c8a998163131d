"""Measures the cost of networks that several threads can call at the same time.

It times a client's step (outputs, cross-entropy, gradients) with two implementations. In `Network`, every call has its
own copy of the module. In the older implementation, all calls share one module, whose weights are replaced during a
call and restored afterwards. Both take turns in one process. The figures are ratios of the thread's processor time in
the same turn.

    python -m benchmarks.reentrant_calls --turns 60 --out results/reentrant.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks.speed.record import machine
from pefll.core.files import write_json
from pefll.models import Network, lenet
from pefll.training.summary import commit

BATCH, CLASSES = 32, 10


class SharedModule(Network):
    """A network whose calls all use one module; it is correct only if one thread calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._only = self._idle[0]

    def __call__(self, parameters: Any, *inputs: Tensor) -> Tensor:
        """Evaluate the shared module with the weights in `parameters` [size]."""
        named = self.unflatten(parameters) if isinstance(parameters, Tensor) else parameters
        like = parameters if isinstance(parameters, Tensor) else next(iter(named.values()))
        values = named | self._constants(like)
        before = [slots[key] for slots, key, _ in self._only.places]
        try:
            for slots, key, name in self._only.places:
                slots[key] = values[name]
            output: Tensor = self._only.fused(*inputs)
        finally:
            for (slots, key, _), value in zip(self._only.places, before, strict=True):
                slots[key] = value
        return output


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return modules with a batch of samples for each."""
    generator = torch.Generator().manual_seed(0)
    tiny = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    mlp = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, CLASSES))
    return {
        "tiny": (tiny, torch.randn(BATCH, 8, generator=generator)),
        "mlp": (mlp, torch.randn(BATCH, 64, generator=generator)),
        "lenet": (lenet((3, 32, 32), CLASSES), torch.randn(BATCH, 3, 32, 32, generator=generator)),
    }


def step(network: Network, x: Tensor) -> Callable[[], None]:
    """Return a function that takes one step of a client."""
    theta = network.init(0, "model").requires_grad_()
    y = torch.arange(len(x)) % CLASSES

    def once() -> None:
        torch.autograd.grad(F.cross_entropy(network(theta, x), y), theta)

    return once


def seconds_of(once: Callable[[], None], steps: int) -> float:
    """Return the processor time of this thread for some steps."""
    began = time.thread_time()
    for _ in range(steps):
        once()
    return time.thread_time() - began


def main() -> None:
    """Measure, show a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="turns of each")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one turn, about")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    table = Table("network", "microseconds a step, one module", "with copies", "ratio of turns, median")
    found = {}
    for name, (module, x) in networks().items():
        now, before = step(Network(module), x), step(SharedModule(module), x)
        steps = max(1, round(given.seconds / max(seconds_of(now, 5) / 5, 1e-9)))
        pairs = []
        for turn in track(range(given.turns), name, console=console, transient=True):
            order = (before, now) if turn % 2 else (now, before)
            took = {once: seconds_of(once, steps) / steps for once in order}
            pairs.append((took[before], took[now]))
        olds, news = zip(*pairs, strict=True)
        ratio = statistics.median(new / old for old, new in pairs)
        found[name] = {"before": statistics.median(olds), "now": statistics.median(news), "ratio": ratio}
        table.add_row(
            name, f"{1e6 * statistics.median(olds):.1f}", f"{1e6 * statistics.median(news):.1f}", f"{ratio:.3f}"
        )
    console.print(table)
    if given.out is not None:
        command = f"python -m benchmarks.reentrant_calls --turns {given.turns} --out {given.out}"
        write_json(given.out, {"command": command, "commit": commit(), "machine": machine(), "networks": found})


if __name__ == "__main__":
    main()
