"""Estimates how much memory a run needs before the run starts, and compares that with the free memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from pefll.core.errors import PefllError, first_line
from pefll.core.machine import available_memory
from pefll.core.wording import argument, either
from pefll.methods import network_settings
from pefll.methods.contract import Method, Problem
from pefll.models.network import Network

NUMBER = 4  # bytes of a float32
# Copies of the server's networks at the peak of a round. The weights and Adam's two moments exist before and after the
# round, for the best round, and for an evaluation in progress. A gradient exists in pieces and joined. The modules that
# drew the first weights exist too. benchmarks/memory.py measures 12 to 17 copies.
NETWORKS = 16
# Copies of these networks on a client. It only needs their shapes: the modules, and a copy while they are built.
CLIENT_NETWORKS = 2
# Copies of a client's model in training: weights, a gradient in pieces and joined, a velocity, and a step's results.
MODELS = 8
# Bytes for each sample of a step (a shuffle of 20 rounds, index, label, intermediate values), and for the step itself.
DRAWN, PER_STEP = 8 * 8, 8 * 60
# Copies of a sample's values in a network's forward and backward pass, roughly.
VALUES = 8


class MemoryPlan(NamedTuple):
    """The sizes that decide how much memory a run needs.

    Attributes:
        weights: number of weights of a client's model.
        networks: number of weights of the server's other networks, such as a hypernetwork.
        clients: number of clients that train at the same time: all of a round, or one per process.
        round_clients: number of clients in a round.
        steps: number of a client's steps in a round.
        batch: number of samples in a step.
        values: number of values in a sample.
        runs: number of runs that train at the same time.
        device: the device that computes the run.
        copies: number of copies of the networks at the peak.
    """

    weights: int
    networks: int
    clients: int
    round_clients: int
    steps: int
    batch: int
    values: int
    runs: int = 1
    device: torch.device = torch.device("cpu")
    copies: int = NETWORKS


class Parts(NamedTuple):
    """Estimated bytes by purpose."""

    networks: int
    models: int
    batches: int


def parts_of(plan: MemoryPlan) -> Parts:
    """Return the estimated bytes of a run; its data and the program itself are not included."""
    models = MODELS * plan.weights * plan.clients + 3 * plan.weights * plan.round_clients + 3 * plan.weights
    drawn = plan.clients * plan.steps * (PER_STEP + DRAWN * plan.batch)
    return Parts(
        networks=plan.runs * NUMBER * plan.copies * plan.networks,
        models=plan.runs * NUMBER * models,
        batches=plan.runs * (drawn + NUMBER * VALUES * plan.clients * plan.batch * plan.values),
    )


def networks_of(build: Callable[[], Method[Any]]) -> int:
    """Return the number of weights of a method's server networks; 0 if they cannot be counted.

    `build` makes the method. Its tensors get no memory, because the device is "meta".
    """
    try:
        with torch.device("meta"):
            sketch = build()
    except PefllError:
        raise
    except Exception as error:  # noqa: BLE001
        if "overflow" in str(error):  # torch says so if the product of the sizes is too large
            raise PefllError(
                f"the method's networks cannot be built: {first_line(error)}; choose smaller sizes", code="PEFLL-L008"
            ) from None
        # A user's constructor may read numbers, but tensors on the device "meta" have none. A real mistake fails again
        # when the method is built on another device.
        return 0
    return sum(value.size for value in vars(sketch).values() if isinstance(value, Network))


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if unknown."""
    if device.type == "cuda":
        # torch keeps freed memory for new tensors. The driver counts that memory as used.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return available_memory()


def check_fits(plan: MemoryPlan, method: str) -> None:
    """Raise PefllError if a run clearly needs more memory than is free; the sentence names the method."""
    free, parts = free_memory(plan.device), parts_of(plan)
    needed = sum(parts)
    if free is None or needed <= free:
        return
    runs_at_once = f" for {plan.runs} runs at once" if plan.runs > 1 else ""
    raise PefllError(
        f"{method} would need about {_gb(needed)} of memory{runs_at_once} ({_purposes(parts, plan)}), but "
        f"{_gb(free)} are left on this {'GPU' if plan.device.type == 'cuda' else 'machine'}; "
        f"{_advice(parts, plan, free, method)}",
        code="PEFLL-L006",
    )


def check_model_fits(problem: str, weights: int) -> None:
    """Raise PefllError if the copies of a client's model do not fit in memory; the sentence starts with `problem`."""
    free = available_memory()
    needed = NUMBER * MODELS * weights
    if free is not None and needed > free:
        raise PefllError(
            f"{problem} has {weights:,} weights and would need about {_gb(needed)} of memory, but {_gb(free)} are "
            f"left; take one of at most about {_rounded(free // (NUMBER * MODELS)):,} weights",
            code="PEFLL-L007",
        )


def sample_values(problem: Problem) -> int:
    """Return how many numbers a sample has."""
    return prod(problem.input_shape)


def _purposes(parts: Parts, plan: MemoryPlan) -> str:
    """Return in words what the memory is for, the largest amount first."""
    optimiser = " with their optimiser" if plan.copies == NETWORKS else ""
    called = {
        "networks": f"{_gb(parts.networks)} for the server's {plan.networks:,} weights{optimiser}",
        "models": f"{_gb(parts.models)} for models of {plan.weights:,} weights, {plan.round_clients} clients a round",
        "batches": f"{_gb(parts.batches)} for the batches of {plan.steps:,} steps",
    }
    order = sorted(Parts._fields, key=lambda name: -getattr(parts, name))
    return ", ".join(called[name] for name in order if getattr(parts, name) > sum(parts) / 100)


def _advice(parts: Parts, plan: MemoryPlan, free: int, method: str) -> str:
    """Return advice: a smaller size of whatever needs the most memory."""
    largest = max(Parts._fields, key=lambda name: getattr(parts, name))
    rest = sum(parts) - getattr(parts, largest)
    share = max(0.0, free - rest) / max(1, getattr(parts, largest))
    runs = f"fewer than {plan.runs} runs at once, or " if plan.runs > 1 else ""
    model = f"a model of at most about {_rounded(int(share * plan.weights)):,} weights"
    if largest == "batches":
        steps = max(1, _rounded(int(share * plan.steps)))
        return f"take {runs}at most about {steps:,} local steps, or a smaller batch_size"
    if largest == "models" and plan.clients > 1:
        return f"take {runs}{argument('clients_per_round', max(1, int(share * plan.clients)))}, or {model}"
    if plan.networks and plan.networks < 200 * plan.weights:
        smaller = "a method without a hypernetwork, such as fedavg"
        if "hypernetwork" in network_settings(method):
            small = either("--set hypernetwork=chunked or low-rank", "hypernetwork='chunked' or 'low-rank'")
            smaller = f"{small}, or {smaller}"
        return f"take {runs}{model} (this one has {plan.weights:,}), or {smaller}"
    if plan.networks:
        return f"take {runs}a smaller descriptor_size or embedding_size, about {share:.2g} times this one"
    return f"take {runs}{model}"


def _rounded(number: int) -> int:
    """Return a number rounded down to two leading digits."""
    unit = int(10 ** max(0, len(str(number)) - 2))
    return number // unit * unit


def _gb(amount: int) -> str:
    return f"{amount / 1e9:,.1f} GB" if amount < 1e15 else f"{amount / 1e9:.1g} GB"
