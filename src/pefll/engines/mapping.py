"""Checks that `torch.vmap` can map a model over clients. If it cannot, the error says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from pefll.core.derivatives import gradient, pull_back
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault
from pefll.core.wording import argument
from pefll.data.client import Batch
from pefll.data.federation import Federation
from pefll.methods.contract import Method, Problem
from pefll.models.check import alike, some_sample, some_weights
from pefll.models.own import OwnEmbedding, own_networks
from pefll.tasks import Task
from pefll.tasks.checking import loss_of
from pefll.tasks.metrics import metric_behind
from pefll.tasks.own import is_own


@contextmanager
def explain_unmappable(problem: Problem) -> Iterator[None]:
    """Raise PefllError if the `with` block fails because the model cannot be mapped, though one client can run it."""
    try:
        yield
    except (PefllError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (reason := _mapping_error(problem)) is None:
            raise
        place = fault(reason).partition(": ")[0] or type(reason).__name__
        raise PefllError(
            f"the vector engine cannot map the model {type(problem.model.module).__name__} over clients, because "
            f"{_short_reason(reason)} ({place}); use {argument('engine', 'serial')}",
            code="PEFLL-E009",
        ) from error


@torch.no_grad()
def check_mapped(problem: Problem) -> None:
    """Raise PefllError if the mapped model gives other scores than the model of one client.

    torch.as_strided is an example: its result depends on the memory layout, which vmap changes without an error.
    """
    model = problem.model
    weights = [0.2 * some_weights(model, which) for which in range(2)]
    samples = [some_sample(problem.input_shape, problem.tokens, which) for which in range(4)]
    batches = [torch.cat(samples[:2]), torch.cat(samples[2:])]
    with explain_unmappable(problem):
        mapped = torch.vmap(model)(torch.stack(weights), torch.stack(batches))
    alone = torch.stack([model(theta, x) for theta, x in zip(weights, batches, strict=True)])
    if not alike(mapped, alone):
        raise PefllError(
            f"the vector engine cannot map the model {type(model.module).__name__} over clients: mapping changes its "
            f"scores, as torch.as_strided would; use {argument('engine', 'serial')}",
            code="PEFLL-E010",
        )


def check_embedding_mapped(method: Method[Any]) -> None:
    """Raise PefllError if a user's own embedding network cannot be mapped over clients, or gives other descriptors."""
    network = own_networks(method).get("embedding")
    if network is None:
        return
    module = cast(OwnEmbedding, network.module)
    theta, name = 0.2 * some_weights(network), type(module.net).__name__
    inputs = [module.example(which) for which in range(2)]

    def descriptor(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        v = network(theta, *inputs).mean(dim=0)
        return v, pull_back(lambda at: network(at, *inputs).mean(dim=0), theta, torch.ones_like(v))

    try:
        mapped = torch.vmap(descriptor)(*(torch.stack(both) for both in zip(*inputs, strict=True)))
    except Exception as error:
        place = fault(error).partition(": ")[0] or type(error).__name__
        raise PefllError(
            f"the vector engine cannot map the embedding {name} over clients, because {_short_reason(error)} "
            f"({place}); use {argument('engine', 'serial')}",
            code="PEFLL-E530",
        ) from error
    for client, one in enumerate(inputs):
        if not all(alike(row[client], wanted) for row, wanted in zip(mapped, descriptor(*one), strict=True)):
            raise PefllError(
                f"the vector engine cannot map the embedding {name} over clients: mapping changes its numbers; use "
                f"{argument('engine', 'serial')}",
                code="PEFLL-E531",
            )


def check_task_mapped(task: Task, federation: Federation) -> None:
    """Raise PefllError if a task's loss, its gradient, its metrics or its encoding cannot be mapped over clients."""
    rows = federation.rows[:2].to(federation.y.device)
    if not len(rows):
        return
    y = federation.y[rows].cpu()
    output = torch.linspace(-1, 1, len(y) * task.outputs).reshape(len(y), task.outputs)
    known = torch.ones(federation.classes, dtype=torch.bool) if federation.classes else None

    def encoding(output: Tensor, y: Tensor) -> Tensor:
        """Encode labels within a gradient, as PeFLL's clients do. torch's one_hot fails only there."""
        return gradient(lambda at: at.sum() * task.encode(y).sum(), output)

    functions: dict[str, Callable[[Tensor, Tensor], Any]] = {
        loss_of(task): lambda output, y: gradient(lambda at: task.loss(at, y).sum(), output),
        f"a metric of the task {type(task).__name__}": lambda output, y: tuple(
            task.measure(output, Batch(output, y, torch.ones(len(y))), known)
        ),
    }
    if is_own(task):
        functions[f"encode of the task {type(task).__name__}"] = encoding
    for what, function in functions.items():
        try:
            torch.vmap(function)(torch.stack([output, -output]), torch.stack([y, y.flip(0)]))
        except Exception as error:  # a user's code may raise anything
            place = fault(error).partition(": ")[0] or type(error).__name__
            one_hot = "write one_hot(y, k) as (y[:, None] == torch.arange(k)).float()"
            advice = one_hot if what.startswith("encode") else "choose between values with torch.where"
            raise PefllError(
                f"the vector engine cannot map {metric_behind(error) or what} over clients, because "
                f"{_short_reason(error)} ({place}); {advice}, or use {argument('engine', 'serial')}",
                code="PEFLL-E640",
            ) from error


def _short_reason(error: Exception) -> str:
    """Return a short reason why mapping failed. torch's messages are long and name operators that no user wrote."""
    text = str(error)
    if "data-dependent" in text:
        return "its code reads a tensor's value, as `if x.sum() > 0`, x.item() and one_hot(x) do"
    if "dynamic shape" in text:
        return "the shape of a tensor depends on values, as x[x > 0] and x.nonzero() do"
    if "Batching rule not implemented" in text:
        return "torch has no rule for " + text.removeprefix("Batching rule not implemented for ").split(". ")[0]
    return f"it fails there: {first_line(error).split('. ')[0]}"


def _mapping_error(problem: Problem) -> Exception | None:
    """Return the error when two clients' steps are mapped on a CPU; None if that works, or if one client fails too."""
    model = problem.model
    theta = torch.zeros(2, model.size)
    x = torch.zeros((2, 2, *problem.input_shape), dtype=torch.int64 if problem.tokens else torch.float32)

    def step(theta: Tensor, x: Tensor) -> Tensor:
        return gradient(lambda at: model(at, x).square().sum(), theta) + model(theta, x).sum()

    try:
        step(theta[0], x[0])
    except Exception:  # noqa: BLE001 - mapping is not the cause
        return None
    try:
        torch.vmap(step)(theta, x)
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        return error
    return None
