"""Compares our serial engine on one core with a plain PyTorch loop, for networks that users might write.

FedAvg on the serial engine and a plain loop on the same images take turns in one process with one thread. They also
take turns to be first. The ratio is the median over the turns. The loop has the same settings of torch and of the C
library as an engine (no denormal numbers, freed memory is kept), which a plain loop normally does not have. The images
are noise of CIFAR-10's shape, in batches of 32, with ten steps per round.

    python -m benchmarks.cpu_networks --out build/networks        # a minute or two
    python -m benchmarks.cpu_networks --only mlp "one convolution" --seconds 0.1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks.lockstep import pictures
from benchmarks.speed.own_cnn import build as own_cnn
from benchmarks.speed.record import machine
from pefll import __version__
from pefll.core.files import make_folder, write_json
from pefll.data import Federation, make_federation
from pefll.engines.serial import SerialEngine
from pefll.methods import build_method
from pefll.models import build_model
from pefll.runs.problem import describe_problem
from pefll.training.summary import commit

STEPS, BATCH = 10, 32


class Shortcut(nn.Module):
    """Two convolutions with group normalisation, and a shortcut for the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in "ab")
        self.one, self.other = (nn.GroupNorm(4, channels) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, channels, h, w]."""
        return F.relu(x + self.other(self.second(F.relu(self.one(self.first(x))))))


class Attention(nn.Module):
    """A network of image patches, one attention layer, and a mean over the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.scores = nn.Conv2d(3, 64, 4, 4), nn.Linear(64, 10)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, 10]."""
        return self.scores(self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))  # type: ignore[no-any-return]


def depthwise(into: int, out: int, stride: int, *norms: nn.Module) -> list[nn.Module]:
    """Return a depthwise and a 1 x 1 convolution, each with a normalisation if two are given."""
    first, second = norms or (nn.Identity(), nn.Identity())
    each = nn.Conv2d(into, into, 3, stride, 1, groups=into)
    return [each, first, nn.ReLU(), nn.Conv2d(into, out, 1), second, nn.ReLU()]


def pooled(pool: Callable[[], nn.Module], bend: Callable[[], nn.Module], *, padding: int = 0) -> list[nn.Module]:
    """Return two convolutions, each with a nonlinearity and pooling."""
    first, second = nn.Conv2d(3, 16, 5, padding=padding), nn.Conv2d(16, 32, 5, padding=padding)
    return [first, bend(), pool(), second, bend(), pool(), nn.Flatten(), nn.LazyLinear(10)]


def grouped(into: int, out: int) -> list[nn.Module]:
    """Return a convolution with group normalisation, ReLU and pooling."""
    return [nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(), nn.MaxPool2d(2)]


def mean_and_scores(channels: int) -> list[nn.Module]:
    """Return the last layers: a mean over the image, and a linear layer for the class scores."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def start() -> nn.Module:
    """Return the first convolution of several of these networks."""
    return nn.Conv2d(3, 16, 3, 2, 1)


def networks() -> dict[str, nn.Module]:
    """Return networks that users might write, for images of 3 x 32 x 32."""
    norms = [nn.GroupNorm(4, channels) for channels in (16, 32, 32, 64)]
    layers: dict[str, list[nn.Module]] = {
        "pooling": pooled(lambda: nn.MaxPool2d(2), nn.ReLU),
        "pooling that overlaps": pooled(lambda: nn.MaxPool2d(3, 2), nn.ReLU, padding=2),
        "average pooling": pooled(lambda: nn.AvgPool2d(2), nn.ReLU),
        "average pooling, tanh": pooled(lambda: nn.AvgPool2d(2), nn.Tanh),
        "normalisation of groups, pooling": [*grouped(3, 16), *grouped(16, 32), nn.Flatten(), nn.Linear(2048, 10)],
        "normalisation of groups, shortcuts": [start(), Shortcut(16), Shortcut(16), *mean_and_scores(16)],
        "depthwise": [start(), nn.ReLU(), *depthwise(16, 32, 1), *depthwise(32, 64, 2), *mean_and_scores(64)],
        "depthwise, normalisation of groups": [
            *(start(), nn.ReLU(), *depthwise(16, 32, 1, *norms[:2])),
            *(*depthwise(32, 64, 2, *norms[2:]), *mean_and_scores(64)),
        ],
        "one convolution": [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 1024, 10)],
        "mlp": [nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10)],
        "linear": [nn.Flatten(), nn.Linear(3072, 10)],
    }
    found = {name: nn.Sequential(*parts) for name, parts in layers.items()}
    for network in found.values():
        network(torch.zeros(1, 3, 32, 32))  # so that lazy layers know their shapes
    return {
        "lenet": build_model("lenet", (3, 32, 32), 10),
        "normalisation of groups, SiLU, strides": own_cnn((3, 32, 32), 10),
        **found,
        "patches, attention": Attention(),
    }


def ours(federation: Federation, network: nn.Module) -> tuple[Callable[[], int], SerialEngine]:
    """Return a function that does a round and returns its number of steps, and the engine, which must be closed."""
    problem, _ = describe_problem(federation, network)
    engine = SerialEngine(federation, build_method("fedavg", problem, {"local_steps": STEPS}), 0, 2)
    state, done = engine.start(), 0

    def round_() -> int:
        nonlocal state, done
        state = engine.advance(state, done, 1)
        done += 1
        return 2 * STEPS

    return round_, engine


def plain(federation: Federation, network: nn.Module) -> Callable[[], int]:
    """Return a function that does as many steps of a textbook loop, and returns their number."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)

    def steps() -> int:
        for _ in range(2 * STEPS):
            rows = torch.randint(0, len(federation.x), (BATCH,))
            x = (federation.x[rows].float() / 255 - 0.5) / 0.25
            optimiser.zero_grad()
            F.cross_entropy(network(x), federation.y[rows]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 50.0)
            optimiser.step()
        return 2 * STEPS

    return steps


def rate(work: Callable[[], int], seconds: float) -> float:
    """Return steps per second."""
    began, steps = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        steps += work()
    return steps / spent


def main() -> None:
    """Measure, print and write after each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for cpu_networks.json")
    parser.add_argument("--only", nargs="+", choices=list(networks()), metavar="NETWORK", help="all by default")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4, help="a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    federation = make_federation(pictures(6_000), partition="by-class 2", clients=20, seed=0)
    table = Table("network", "ours, steps/s", "plain, steps/s", "times")
    results: dict[str, Any] = machine() | {"version": __version__, "commit": commit(), "networks": {}}
    for name in track(options.only or list(networks()), "networks", transient=True):
        turns = race(federation, name, options.turns, options.seconds)
        medians = [round(statistics.median(column), 1) for column in zip(*turns, strict=True)]
        times = round(statistics.median(a / b for a, b in turns), 3)
        table.add_row(name, *(f"{median:.0f}" for median in medians), f"{times:.2f}")
        results["networks"][name] = {"ours": medians[0], "plain": medians[1], "times": times}
        if options.out:
            results["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
            make_folder(options.out)
            write_json(options.out / "cpu_networks.json", results)
    Console().print(table)


def race(federation: Federation, name: str, turns: int, seconds: float) -> list[tuple[float, float]]:
    """Return the steps per second of ours and of the plain loop, for each turn."""
    torch.manual_seed(0)
    mine, engine = ours(federation, networks()[name])
    theirs = plain(federation, networks()[name])
    mine()
    theirs()
    found = []
    for turn in range(turns):
        works = (mine, theirs) if turn % 2 == 0 else (theirs, mine)
        rates = {work: rate(work, seconds) for work in works}
        found.append((rates[mine], rates[theirs]))
    engine.close()
    return found


if __name__ == "__main__":
    main()
