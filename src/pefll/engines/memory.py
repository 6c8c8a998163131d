"""How much memory a run will take, counted before any of it is taken, beside what there is."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from pefll.core.errors import PefllError, first_line
from pefll.core.machine import available_memory
from pefll.core.wording import argument
from pefll.methods.contract import Method, Problem
from pefll.models.network import Network

NUMBER = 4  # bytes of a float32
# How many times the server's networks exist at the peak of a round: they and Adam's two moments, the same again as they
# come out of the round, those of the best round and of one under way, a gradient in parts and joined, and the modules
# they were drawn from. benchmarks/memory.py measures 12 to 17.
NETWORKS = 16
# The same on a client, which builds them for their shapes alone: the modules and a copy while they are made.
CLIENT_NETWORKS = 2
# How many times a client's model exists while it is trained: itself, a gradient in parts and joined, a velocity, and
# what a step makes of them.
MODELS = 8
# For one sample of a step: 20 rounds of a shuffle that draws it, its number, its label, and what they pass through.
DRAWN, PER_STEP = 8 * 8, 8 * 60
# A sample's values on their way through a network, forwards and backwards, roughly.
VALUES = 8


class MemoryPlan(NamedTuple):
    """What a run is about to do, in numbers.

    Attributes:
        weights: of a client's model.
        networks: weights of the networks that the server learns besides, such as a hypernetwork.
        clients: trained at the same time: those of a round, or as many as there are processes.
        round_clients: c.
        steps: of a client in a round.
        batch: samples of a step.
        values: of one sample.
        runs: that are trained at once.
        device: where.
        copies: how many times the networks exist at the peak.
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
    """What the bytes are for; the fields' names are as sentences have them."""

    networks: int
    models: int
    batches: int


def parts_of(plan: MemoryPlan) -> Parts:
    """Return the bytes that a run is estimated to take, beside its data and the program itself."""
    models = MODELS * plan.weights * plan.clients + 3 * plan.weights * plan.round_clients + 3 * plan.weights
    drawn = plan.clients * plan.steps * (PER_STEP + DRAWN * plan.batch)
    return Parts(
        networks=plan.runs * NUMBER * plan.copies * plan.networks,
        models=plan.runs * NUMBER * models,
        batches=plan.runs * (drawn + NUMBER * VALUES * plan.clients * plan.batch * plan.values),
    )


def networks_of(build: Callable[[], Method[Any]]) -> int:
    """Return how many weights the networks have that a method makes for its server; 0 where that cannot be counted.

    Args:
        build: makes the method; here it does so without memory for weights.
    """
    try:
        with torch.device("meta"):
            sketch = build()
    except PefllError:
        raise
    except Exception as error:  # noqa: BLE001
        if "overflow" in str(error):  # torch's word for sizes whose product no number can hold
            raise PefllError(
                f"the method's networks cannot be built: {first_line(error)}; choose smaller sizes", code="PEFLL-L008"
            ) from None
        # A constructor of one's own may read numbers, which tensors without memory do not have. If it is really at
        # fault, the same error comes when the method is built with memory.
        return 0
    return sum(value.size for value in vars(sketch).values() if isinstance(value, Network))


def there_is(device: torch.device) -> int | None:
    """Return the bytes of memory that are left on a device; None where nobody says."""
    if device.type == "cuda":
        # Torch keeps memory that it has freed, for its next tensors. The driver counts it as taken.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return available_memory()


def check_fits(plan: MemoryPlan, method: str) -> None:
    """Raise PefllError where a run would clearly take more memory than there is.

    Args:
        plan: of the run.
        method: its name, for the sentence.
    """
    there, parts = there_is(plan.device), parts_of(plan)
    needed = sum(parts)
    if there is None or needed <= there:
        return
    together = f" for {plan.runs} runs at once" if plan.runs > 1 else ""
    raise PefllError(
        f"{method} would need about {_gb(needed)} of memory{together} ({_words(parts, plan)}), but {_gb(there)} are "
        f"left on this {'GPU' if plan.device.type == 'cuda' else 'machine'}; {_advice(parts, plan, there)}",
        code="PEFLL-L006",
    )


def check_model_fits(problem: str, weights: int) -> None:
    """Raise PefllError where a model alone, which is copied some times before training, is too large for the machine.

    Args:
        problem: what is too large, for the sentence.
        weights: of the model.
    """
    there = available_memory()
    needed = NUMBER * MODELS * weights
    if there is not None and needed > there:
        raise PefllError(
            f"{problem} has {weights:,} weights and would need about {_gb(needed)} of memory, but {_gb(there)} are "
            f"left; take one of at most about {_round(there // (NUMBER * MODELS)):,} weights",
            code="PEFLL-L007",
        )


def sample_values(problem: Problem) -> int:
    """Return how many numbers a sample has."""
    return prod(problem.input_shape)


def _words(parts: Parts, plan: MemoryPlan) -> str:
    """Return what the memory is for, the largest part first."""
    optimiser = " with their optimiser" if plan.copies == NETWORKS else ""
    called = {
        "networks": f"{_gb(parts.networks)} for the server's {plan.networks:,} weights{optimiser}",
        "models": f"{_gb(parts.models)} for models of {plan.weights:,} weights, {plan.round_clients} clients a round",
        "batches": f"{_gb(parts.batches)} for the batches of {plan.steps:,} steps",
    }
    order = sorted(Parts._fields, key=lambda name: -getattr(parts, name))
    return ", ".join(called[name] for name in order if getattr(parts, name) > sum(parts) / 100)


def _advice(parts: Parts, plan: MemoryPlan, there: int) -> str:
    """Return what would fit, by what takes the most."""
    largest = max(Parts._fields, key=lambda name: getattr(parts, name))
    rest = sum(parts) - getattr(parts, largest)
    share = max(0.0, there - rest) / max(1, getattr(parts, largest))
    runs = f"fewer than {plan.runs} runs at once, or " if plan.runs > 1 else ""
    if largest == "batches":
        return (
            f"take {runs}at most about {max(1, _round(int(share * plan.steps))):,} local steps, or a smaller batch_size"
        )
    if largest == "models" and plan.clients > 1:
        clients = argument("clients_per_round", max(1, int(share * plan.clients)))
        return f"take {runs}{clients}, or a model of at most about {_round(int(share * plan.weights)):,} weights"
    if plan.networks and plan.networks < 200 * plan.weights:
        return (
            f"take {runs}a model of at most about {_round(int(share * plan.weights)):,} weights (this one has "
            f"{plan.weights:,}), or a method without a hypernetwork, such as fedavg"
        )
    if plan.networks:
        return f"take {runs}a smaller descriptor_size or embedding_size, about {share:.2g} times this one"
    return f"take {runs}a model of at most about {_round(int(share * plan.weights)):,} weights"


def _round(number: int) -> int:
    """Return a whole number cut to two digits."""
    unit = int(10 ** max(0, len(str(number)) - 2))
    return number // unit * unit


def _gb(amount: int) -> str:
    return f"{amount / 1e9:,.1f} GB" if amount < 1e15 else f"{amount / 1e9:.1g} GB"
