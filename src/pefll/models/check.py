"""Checks of a user's network: its layers, its output for an example, and its probe.

A run stores weights but not code. So a user may later give another module, for example with other nonlinearities,
although the stored weights fit. The probe detects this: it is the scores of the network for fixed artificial weights
and an artificial sample.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pefll.core import randomness
from pefll.core.derivatives import gradient
from pefll.core.errors import PefllError, first_line
from pefll.models.batchnorm import keeps_statistics

if TYPE_CHECKING:
    from pefll.models.network import Network


TOLERANCE = 1e-3  # relative to the largest score, because processors and versions of torch round differently
# Scale of the probe's weights -> precision. Large weights reveal, for example, ReLU6 instead of ReLU. They amplify
# rounding errors, so they need double precision to give equal scores on every processor.
SCALES = {0.2: torch.float32, 20.0: torch.float64}


def check_layers(module: nn.Module) -> None:
    """Raise PefllError for layers and parameters that do not work with a flat vector of weights."""
    check_parameters = functools.partial(_check_parameters, registered=set(module.modules()))
    for check in (_check_layer, check_parameters, _check_computed):
        for name, layer in module.named_modules():
            kind = type(layer).__name__
            check(f"layer {name!r} ({kind})" if name else f"the model {kind}", layer)


def _check_layer(where: str, layer: nn.Module) -> None:
    """Raise PefllError for a layer with batch statistics, random numbers or gradients that vmap does not support."""
    if keeps_statistics(layer):
        raise PefllError(
            f"{where} keeps statistics of batches, which are no weights and so cannot be trained across clients; "
            "replace such layers by GroupNorm with pefll.replace_batchnorm(model)",
            code="PEFLL-N028",
        )
    if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
        raise PefllError(
            f"{where} draws its own random numbers, so runs would not repeat; set its p to 0", code="PEFLL-N029"
        )
    for option in ("sparse", "scale_grad_by_freq"):
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and getattr(layer, option):
            raise PefllError(
                f"{where} has gradients that torch.func.vmap does not support; set its {option} to False",
                code="PEFLL-N030",
            )


def _check_parameters(where: str, layer: nn.Module, registered: set[nn.Module]) -> None:
    """Raise PefllError for lazy or complex parameters, and for layers that torch has not `registered` in the model."""
    for key, value in layer.named_parameters(recurse=False):
        if is_lazy(value):
            raise PefllError(
                f"{where} does not know its shape yet; first call the model on an example, such as "
                "torch.zeros(1, *input_shape)",
                code="PEFLL-N031",
            )
        if value.is_complex() and value.requires_grad:
            raise PefllError(
                f"{where} has a complex parameter {key!r}; make it a real one with one more axis of length 2, and "
                "call torch.view_as_complex on it in forward",
                code="PEFLL-N032",
            )
    for key, value in vars(layer).items():
        held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        if not key.startswith("_") and any(isinstance(one, nn.Module) and one not in registered for one in held):
            raise PefllError(
                f"{where} has layers in a plain {type(value).__name__}, {key!r}, which torch does not train; "
                "use nn.ModuleList or nn.ModuleDict",
                code="PEFLL-N033",
            )


def _check_computed(where: str, layer: nn.Module) -> None:
    """Raise PefllError for a layer with a non-leaf tensor, which cannot be copied."""
    for key, value in vars(layer).items():
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            raise PefllError(
                f"{where} holds the non-leaf tensor {key!r}, which cannot be deep-copied; pass a freshly built model, "
                "and take weight_norm from torch.nn.utils.parametrizations",
                code="PEFLL-N034",
            )


def check_model(
    network: Network, input_shape: tuple[int, ...], classes: int, tokens: bool, thing: str = "class"
) -> None:
    """Raise PefllError if a client model does not map each sample of `input_shape` to `classes` scores.

    A score is for a `thing`, such as a class; if that is empty, for an output of the task.

    A sample's scores must not depend on other samples, because batches are padded. Scores must not be random, because
    runs must be repeatable.
    """
    module = copy.deepcopy(network.module)  # a call may change the module
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
                    f"{name} changes its {kind} {key!r} when it is evaluated; remove the code that does so",
                    code="PEFLL-N006",
                )
        if not torch.equal(given, example):
            raise PefllError(
                f"{name} changes its input; write x = x - 1 instead of x -= 1, and do not use inplace=True",
                code="PEFLL-N007",
            )
        if not isinstance(output, Tensor):
            raise PefllError(
                f"{name} returns a {type(output).__name__}; it must return one tensor of scores", code="PEFLL-N008"
            )
        if tuple(output.shape) != (3, classes):
            things, width = ("classes", "number of classes") if thing else ("outputs of the task", "number of outputs")
            raise PefllError(
                f"{name} gives {tuple(output.shape)[1:]} scores per sample but there are {classes} {things}; "
                f"make its last layer as wide as the {width}",
                code="PEFLL-N009",
            )
        if output.dtype != torch.float32:
            raise PefllError(
                f"{name} returns scores of {output.dtype} for samples of torch.float32; convert them", code="PEFLL-N010"
            )
        if torch.isnan(output).any():  # infinite scores may be classes that a model rules out
            raise PefllError(
                f"{name} gives scores that are NaN for samples between 0 and 1, before any training; correct its "
                "weights and what its forward computes",
                code="PEFLL-N571",
            )
        if not torch.equal(output, again):
            raise PefllError(
                f"{name} gives different scores for the same samples; remove its random operations", code="PEFLL-N011"
            )
        if not _alike(output[:2], pair) or not _alike(output[:1], _run_one(module, name, example[:1], output[:1])):
            raise PefllError(
                f"{name} gives a sample different scores in different batches; remove operations that mix samples",
                code="PEFLL-N012",
            )
        if not _alike(module.eval()(example.clone()), output):
            raise PefllError(
                f"{name} gives different scores after eval(); it must compute the same in both modes",
                code="PEFLL-N013",
            )
    _check_trains(network, name, example)


def _example(module: nn.Module, shape: tuple[int, ...], tokens: bool) -> Tensor:
    """Return random samples of this shape, with values that the module probably accepts."""
    if tokens:
        return torch.zeros(shape, dtype=torch.int64)
    example = torch.randn(shape)
    try:
        scores = module(example.clone())
        fits = not isinstance(scores, Tensor) or not torch.isnan(scores).any()  # a logarithm needs positive values
    except Exception:  # noqa: BLE001 - user code may raise anything, for example if it uses features as word indices
        fits = False
    return example if fits else example.abs().clamp(min=0.01, max=0.99)


def _run_one(module: nn.Module, name: str, sample: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of a batch of one sample, [1, classes]; PefllError if the module does not accept it."""
    try:
        alone = module(sample.clone())
    except Exception as error:
        raise PefllError(
            f"{name} does not accept one sample alone, [1, ...]: {first_line(error)}", code="PEFLL-N014"
        ) from error
    if not isinstance(alone, Tensor) or alone.shape != scores.shape:
        raise PefllError(
            f"{name} returns scores of shape {tuple(alone.shape)} for one sample, not {tuple(scores.shape)}; "
            "give squeeze() the axis to remove",
            code="PEFLL-N015",
        )
    return alone


def _check_trains(network: Network, name: str, example: Tensor) -> None:
    """Raise PefllError if the gradient of the parameters cannot be computed."""
    own = dict(network.module.named_parameters())
    theta = network.flatten([own[key].detach().cpu() for key in network.names])
    try:
        gradient(lambda at: network(at, example.clone()).square().sum(), theta)
    except Exception as error:
        raise PefllError(
            f"the gradient of {name} cannot be computed: {first_line(error)}", code="PEFLL-N017"
        ) from error


def _alike(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def probe(network: Network, input_shape: tuple[int, ...], tokens: bool) -> list[list[float | None]]:
    """Return the probe: the scores of one sample for each of `SCALES`. A score that is not finite becomes None."""
    sample, rows = some_sample(input_shape, tokens), []
    for scale, dtype in SCALES.items():
        weights = (scale * some_weights(network)).to(dtype)
        rows.append(_scores(network, weights, sample if tokens else sample.to(dtype)))
    return rows


def _scores(network: Network, weights: Tensor, sample: Tensor) -> list[float | None]:
    try:
        with torch.no_grad():
            scores = network(weights, sample)[0].tolist()
    except Exception:  # noqa: BLE001 - a user's code may reject such inputs
        return []
    return [float(f"{score:.6g}") if math.isfinite(score) else None for score in scores]


def some_weights(network: Network, which: int = 0) -> Tensor:
    """Return artificial weights [D] between -1 and 1; each `which` gives other weights."""
    return torch.arange(1.0, network.size + 1).double().add(which).sin().float()


def some_sample(input_shape: tuple[int, ...], tokens: bool, which: int = 0) -> Tensor:
    """Return an artificial sample [1, ...]; each `which` gives another sample."""
    numbers = torch.arange(torch.Size(input_shape).numel()).view(1, *input_shape)
    if tokens:
        return (numbers + which) % 2  # every vocabulary has the tokens 0 and 1
    # Values between 0 and 1 are valid as pixels, as features and, rounded down, as word indices.
    return 0.99 * numbers.double().mul(0.7).add(which).sin().abs().float()


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Return whether scores of any shape are equal up to rounding."""
    finite = wanted[wanted.isfinite()]
    near = max(1e-6, TOLERANCE * float(finite.abs().max())) if len(finite) else 0.0
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=near, equal_nan=True)
