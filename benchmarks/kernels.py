"""Compares the time of LeNet's operations with a client axis: our kernels, and torch's kernels under vmap.

Each operation, with its gradients, is recorded several times into one CUDA graph, which is replayed. Both versions take
turns. The table has medians and their ratios. Ours also runs three times at once on three streams, as three seeds do.
This needs a GPU.

    python -m benchmarks.kernels --out build/kernels
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from pefll.backend import client_axis
from pefll.backend.blocks import conv_block, linear_block
from pefll.backend.optim import sgd_step
from pefll.core import randomness
from pefll.core.errors import PefllError
from pefll.core.files import write_json
from pefll.engines.hardware import device_name, pick_device
from pefll.engines.settings import set_for_engines
from pefll.methods.optim import SGD
from pefll.training.summary import commit

BATCH, IN_A_GRAPH = 32, 10
PARAMETERS = (1200, 16, 12_800, 32, 96_000, 120, 10_080, 84, 840, 10)  # numbers of LeNet's parameters, layer by layer
TIMES = {"ours_us": "ours, us", "ours_three_us": "three at once, us", "torch_us": "torch, us"}
Operation = Callable[[], Any]


@contextmanager
def plain() -> Iterator[None]:
    """Turn our kernels off inside the `with` block."""
    real = client_axis.available
    client_axis.available = lambda *_: False
    try:
        yield
    finally:
        client_axis.available = real


class Recorded(NamedTuple):
    """A graph that does an operation IN_A_GRAPH times, and the stream for it."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream


def recorded(operation: Operation) -> Recorded:
    """Record an operation into a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            operation()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_A_GRAPH):
            operation()
    return Recorded(graph, stream)


def microseconds(*several: Recorded) -> float:
    """Return the time of one operation in microseconds, while all given graphs run at the same time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream()
    start.record()
    for one in several:
        one.stream.wait_stream(current)
        with torch.cuda.stream(one.stream):
            one.graph.replay()
    for one in several:
        current.wait_stream(one.stream)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / IN_A_GRAPH


def operations(clients: int) -> dict[str, Operation]:
    """Return LeNet's operations for a number of clients; each computes a block and all its gradients."""

    def random(*shape: int) -> Tensor:
        return torch.randn(clients, *shape, device="cuda")

    def with_gradients(block: Callable[..., Tensor], given: Tensor, *learned: Tensor, inputs: bool) -> Operation:
        of = tuple(range(len(learned) + 1)) if inputs else tuple(range(1, len(learned) + 1))
        gradients = torch.vmap(torch.func.grad(lambda *a: block(*a).sum(), argnums=of))
        return lambda: gradients(given, *learned)

    def pooled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return conv_block(x, w, b, 1, 0, 1, 1, True, 2)

    def hidden(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_block(x, w, b, True)

    labels = torch.randint(10, (clients, BATCH), device="cuda")
    weight = torch.ones(clients, BATCH, device="cuda")
    # Parameters, velocity, and one gradient array per layer.
    scores, vectors = random(BATCH, 10), [random(size) for size in (sum(PARAMETERS), sum(PARAMETERS), *PARAMETERS)]
    sgd = SGD(2e-3, 0.9, 5e-5, 50.0)
    keys = torch.arange(clients, device="cuda")
    return {
        "convolution 3 to 16, pooled": with_gradients(
            pooled, random(BATCH, 3, 32, 32), random(16, 3, 5, 5), random(16), inputs=False
        ),
        "convolution 16 to 32, pooled": with_gradients(
            pooled, random(BATCH, 16, 14, 14), random(32, 16, 5, 5), random(32), inputs=True
        ),
        "linear 800 to 120": with_gradients(hidden, random(BATCH, 800), random(120, 800), random(120), inputs=True),
        "linear 120 to 84": with_gradients(hidden, random(BATCH, 120), random(84, 120), random(84), inputs=True),
        "cross-entropy": lambda: torch.vmap(torch.func.grad(client_axis.cross_entropy))(scores, labels, weight),
        "step of SGD": lambda: torch.vmap(lambda theta, v, *g: sgd_step(theta, v, g, sgd, in_place=True))(*vectors),
        "random choice of 50 batches": lambda: torch.vmap(
            lambda key: randomness.choose(randomness.spread(key, 50), 400, BATCH)
        )(keys),
    }


def card(parser: argparse.ArgumentParser) -> torch.device:
    """Return the GPU; if there is none, exit with a sentence."""
    try:
        return pick_device("cuda")
    except PefllError:
        parser.error("this needs a CUDA device, and torch sees none here")


def main() -> None:
    """Time all operations and write kernels.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for kernels.json")
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    device = card(parser)
    set_for_engines(options.precision)
    console, rows = Console(), []
    for clients in (5, 50):
        copies = [operations(clients) for _ in range(3)]
        for name in track(copies[0], f"{clients} clients", console=console):
            three = [recorded(copy[name]) for copy in copies]
            with plain():
                theirs = recorded(copies[0][name])
            turns = [(microseconds(three[0]), microseconds(*three), microseconds(theirs)) for _ in range(options.turns)]
            medians = (round(statistics.median(times), 2) for times in zip(*turns, strict=True))
            rows.append({"clients": clients, "operation": name} | dict(zip(TIMES, medians, strict=True)))
    table = Table("clients", "operation", *TIMES.values(), "times as fast")
    for row in rows:
        ratio = row["torch_us"] / row["ours_us"]
        table.add_row(*(str(row[key]) for key in ("clients", "operation", *TIMES)), f"{ratio:.1f}")
    console.print(table)
    facts = {"device": device_name(device), "torch": torch.__version__, "precision": options.precision}
    options.out.mkdir(parents=True, exist_ok=True)
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(options.out / "kernels.json", {**facts, "commit": commit(), "finished": finished, "kernels": rows})


if __name__ == "__main__":
    main()
