"""Whether a model can be mapped over clients, and why not, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pefll.core.derivatives import gradient
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault
from pefll.core.wording import argument
from pefll.methods.contract import Problem
from pefll.models.probe import alike, some_sample, some_weights


@contextmanager
def saying_what_cannot_be_mapped(problem: Problem) -> Iterator[None]:
    """Raise PefllError where something fails because the model, though one client can run it, cannot be mapped."""
    try:
        yield
    except (PefllError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (reason := _why_not_mapped(problem)) is None:
            raise
        place = fault(reason).partition(": ")[0] or type(reason).__name__
        raise PefllError(
            f"the vector engine cannot map the model {type(problem.model.module).__name__} over clients, because "
            f"{_in_short(reason)} ({place}); use {argument('engine', 'serial')}",
            code="PEFLL-E009",
        ) from error


@torch.no_grad()
def check_mapped(problem: Problem) -> None:
    """Raise PefllError where the model, mapped over clients, gives other scores than it gives each of them alone.

    So it is where its code reads memory as it lies, which is up to who maps: no operation complains of that.
    """
    model = problem.model
    weights = [0.2 * some_weights(model, which) for which in range(2)]
    samples = [some_sample(problem.input_shape, problem.tokens, which) for which in range(4)]
    batches = [torch.cat(samples[:2]), torch.cat(samples[2:])]
    with saying_what_cannot_be_mapped(problem):
        mapped = torch.vmap(model)(torch.stack(weights), torch.stack(batches))
    alone = torch.stack([model(theta, x) for theta, x in zip(weights, batches, strict=True)])
    if not alike(mapped, alone):
        raise PefllError(
            f"the vector engine cannot map the model {type(model.module).__name__} over clients: it gives other scores "
            f"there, as code does that reads memory as it lies (torch.as_strided); use {argument('engine', 'serial')}",
            code="PEFLL-E010",
        )


def _in_short(error: Exception) -> str:
    """Return why something cannot be mapped; torch's own explanations are long, and of operators that nobody wrote."""
    text = str(error)
    if "data-dependent" in text:
        return "its code asks what a tensor's value is, as `if x.sum() > 0`, x.item() and one_hot(x) do"
    if "dynamic shape" in text:
        return "the shape of a tensor depends on values, as x[x > 0] and x.nonzero() do"
    if "Batching rule not implemented" in text:
        return "torch has no rule for " + text.removeprefix("Batching rule not implemented for ").split(". ")[0]
    return f"it fails there: {first_line(error).split('. ')[0]}"


def _why_not_mapped(problem: Problem) -> Exception | None:
    """Return why two clients cannot take a step with the model side by side, on the CPU, where each can alone."""
    model = problem.model
    theta = torch.zeros(2, model.size)
    x = torch.zeros((2, 2, *problem.input_shape), dtype=torch.int64 if problem.tokens else torch.float32)

    def step(theta: Tensor, x: Tensor) -> Tensor:
        return gradient(lambda at: model(at, x).square().sum(), theta) + model(theta, x).sum()

    try:
        step(theta[0], x[0])
    except Exception:  # noqa: BLE001 - then mapping is not to blame
        return None
    try:
        torch.vmap(step)(theta, x)
    except Exception as error:  # noqa: BLE001 - whatever code a user has written
        return error
    return None
