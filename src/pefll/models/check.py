"""Whether a model fits the data and can be trained, by trying it before a run starts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from pefll.core import randomness
from pefll.core.derivatives import gradient
from pefll.core.errors import PefllError, first_line
from pefll.models.network import Network


def check_model(network: Network, input_shape: tuple[int, ...], classes: int, tokens: bool) -> None:
    """Raise PefllError where a client model does not map each sample of `input_shape` to `classes` scores.

    Samples must not influence each other, and the same sample must get the same scores again: otherwise padding would
    change results, and runs would not repeat.
    """
    module = copy.deepcopy(network.module)  # which may change when it is evaluated
    name = f"the model {type(module).__name__}"
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise PefllError(
                f"{name} has a parameter {key!r} of {parameter.dtype}; make all float32, with model.float()",
                code="PEFLL-N004",
            )
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with randomness.initial_weights(0, "example"), torch.no_grad():
        example = _example(module, (3, *input_shape), tokens)
        given = example.clone()
        try:
            output, again, pair = (module(x) for x in (given, example.clone(), example[:2].clone()))
        except Exception as error:
            raise PefllError(
                f"{name} does not accept samples of shape {input_shape}: {first_line(error)}", code="PEFLL-N005"
            ) from error
        for key, value in module.state_dict().items():
            if not torch.equal(value, before[key]):
                kind = "parameter" if key in network.names else "buffer"
                raise PefllError(
                    f"{name} changes its {kind} {key!r} when it is evaluated; remove it", code="PEFLL-N006"
                )
        if not torch.equal(given, example):
            raise PefllError(
                f"{name} changes the samples that it is given; write x = x - 1 for x -= 1, without inplace=True",
                code="PEFLL-N007",
            )
        if not isinstance(output, Tensor):
            raise PefllError(
                f"{name} returns a {type(output).__name__}; it must return one tensor of scores", code="PEFLL-N008"
            )
        if tuple(output.shape) != (3, classes):
            raise PefllError(
                f"{name} gives {tuple(output.shape)[1:]} scores per sample but there are {classes} classes; "
                "make its last layer as wide as the number of classes",
                code="PEFLL-N009",
            )
        if output.dtype != torch.float32:
            raise PefllError(
                f"{name} returns scores of {output.dtype} for samples of torch.float32; convert them", code="PEFLL-N010"
            )
        if not torch.equal(output, again):
            raise PefllError(
                f"{name} gives the same samples other scores each time; remove what is random in it", code="PEFLL-N011"
            )
        if not _alike(output[:2], pair):
            raise PefllError(
                f"{name} gives a sample other scores in other batches; remove what mixes samples", code="PEFLL-N012"
            )
        _check_one_sample(module, name, example[:1], output[:1])
        if not _alike(module.eval()(example.clone()), output):
            raise PefllError(
                f"{name} gives other scores after eval(), as it will be used, than in training; mend that",
                code="PEFLL-N013",
            )
    _check_trains(network, name, example)


def _example(module: nn.Module, shape: tuple[int, ...], tokens: bool) -> Tensor:
    """Return samples to try a module with."""
    if tokens:
        return torch.zeros(shape, dtype=torch.int64)
    example = torch.randn(shape)
    try:
        module(example.clone())
    except Exception:  # noqa: BLE001 - whatever code a user has written; it may take features for numbers of words
        return example.abs().clamp(max=0.99)
    return example


def _check_one_sample(module: nn.Module, name: str, sample: Tensor, scores: Tensor) -> None:
    try:
        alone = module(sample.clone())
    except Exception as error:
        raise PefllError(
            f"{name} does not accept one sample alone, [1, ...]: {first_line(error)}", code="PEFLL-N014"
        ) from error
    if not isinstance(alone, Tensor) or alone.shape != scores.shape:
        raise PefllError(
            f"{name} gives one sample alone scores of shape {tuple(alone.shape)} and not {tuple(scores.shape)}; "
            "name the axes that squeeze() is to remove",
            code="PEFLL-N015",
        )
    if not _alike(scores, alone):
        raise PefllError(
            f"{name} gives a sample other scores in other batches; remove what mixes samples", code="PEFLL-N012"
        )


def _check_trains(network: Network, name: str, example: Tensor) -> None:
    """Raise PefllError where the gradient of the parameters cannot be computed."""
    own = dict(network.module.named_parameters())
    theta = network.flatten([own[key].detach().cpu() for key in network.names])
    try:
        gradient(lambda at: network(at, example.clone()).square().sum(), theta)
    except Exception as error:
        raise PefllError(
            f"{name} has no gradient that a client could follow: {first_line(error)}", code="PEFLL-N017"
        ) from error


def _alike(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4)
