"""What a run's clients learn: the model, built and checked, and the facts that a personal model carries."""

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


def describe_problem(federation: Federation, model: str | nn.Module) -> tuple[Problem, dict[str, Any]]:
    """Return what there is to learn, and the facts a personal model carries with it."""
    name = resolve_model(model, federation.input_shape, federation.tokens) if isinstance(model, str) else ""
    shape, classes = federation.input_shape, federation.classes
    module = model if isinstance(model, nn.Module) else build_checked_model(name, shape, classes)
    network = Network(module)
    check_model(network, federation.input_shape, federation.classes, federation.tokens)
    problem = Problem(network, federation.input_shape, federation.classes, federation.num_clients, federation.tokens)
    facts = {
        "model": name,
        "input_shape": list(federation.input_shape),
        "classes": federation.classes,
        "normalise": [list(part) for part in federation.normalise] if federation.normalise else None,
        "tokens": federation.tokens,
        "class_names": list(federation.class_names),
        "feature_names": list(federation.feature_names),
        "label_column": federation.label_column,
        "client_column": federation.client_column,
        "num_clients": federation.num_clients,
        "dataset": federation.name,
        "weights": network.size,
        "probe": probe(network, federation.input_shape, federation.tokens),
    }
    return problem, facts


def build_checked_model(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Do as `build_model`; PefllError before a model of the package is made that is too large for the machine.

    Args:
        name: of the model.
        input_shape: of one sample.
        classes: width of the output.
    """
    if name in MODELS:
        with torch.device("meta"):
            sketch = MODELS[name](input_shape, classes)
        check_model_fits(f"the model {name}", sum(part.numel() for part in sketch.parameters()))
    return build_model(name, input_shape, classes)


def build_checked_method(name: str, problem: Problem, settings: dict[str, Any]) -> Method[Any]:
    """Do as `build_method`; PefllError before networks are made that are too large for the machine."""
    build = partial(build_method, name, problem, settings)
    check_model_fits(f"the server of {name}", networks_of(build))
    return build()
