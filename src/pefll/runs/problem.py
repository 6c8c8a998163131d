"""The learning problem of a run, and the spec of its model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from pefll.data.federation import Federation
from pefll.engines.memory import check_model_fits, networks_of
from pefll.methods import build_method
from pefll.methods.contract import Method, Problem
from pefll.models import MODELS, Network, build_model, check_model, resolve_model
from pefll.models.check import probe
from pefll.models.spec import ModelSpec
from pefll.tasks import Task
from pefll.tasks.checking import check_loss
from pefll.tasks.names import inferred, name_of
from pefll.tasks.sums import layout_of


def describe_problem(
    federation: Federation, model: str | nn.Module, task: Task | None = None
) -> tuple[Problem, ModelSpec]:
    """Return the learning problem of a federation, and the spec of its model; by default the task fits the labels."""
    shape, classes, tokens = federation.input_shape, federation.classes, federation.tokens
    bound = (task or inferred(federation)).bind(federation)
    name = resolve_model(model, shape, tokens) if isinstance(model, str) else ""
    network = Network(model if isinstance(model, nn.Module) else build_checked_model(name, shape, bound.outputs))
    check_model(network, shape, bound.outputs, tokens, "class" if classes else "")
    check_loss(bound, federation)
    layout_of(bound, federation.y, classes)  # so that sums that cannot be used are an error now
    spec = ModelSpec(
        model=name,
        input_shape=shape,
        classes=classes,
        normalise=federation.normalise,
        tokens=tokens,
        class_names=federation.class_names,
        feature_names=federation.feature_names,
        label_column=federation.label_column,
        client_column=federation.client_column,
        num_clients=federation.num_clients,
        dataset=federation.name,
        weights=network.size,
        probe=probe(network, shape, tokens),
        task=name_of(bound) or None,
        outputs=None if classes else bound.outputs,
        label_columns=federation.y.shape[1] if federation.y.dim() > 1 else None,
    )
    return Problem(network, shape, classes, federation.num_clients, tokens, bound), spec


def build_checked_model(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model of `build_model`; PefllError if a model of this package is too large for the machine."""
    if name in MODELS:
        with torch.device("meta"):
            sketch = MODELS[name](input_shape, classes)
        check_model_fits(f"the model {name}", sum(part.numel() for part in sketch.parameters()))
    return build_model(name, input_shape, classes)


def build_checked_method(name: str, problem: Problem, settings: dict[str, Any]) -> Method[Any]:
    """Return the method of `build_method`; PefllError if its networks are too large for the machine."""
    build = partial(build_method, name, problem, settings)
    check_model_fits(f"the server of {name}", networks_of(build))
    return build()
