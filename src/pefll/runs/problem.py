"""The learning problem of a run, and the spec of its model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.federation import Federation
from pefll.engines.memory import check_model_fits, networks_of
from pefll.methods import build_method, network_settings
from pefll.methods.contract import Method, Problem
from pefll.models import MODELS, Network, build_model, check_model, own, resolve_model
from pefll.models.check import probe
from pefll.models.spec import ModelSpec
from pefll.tasks import Classification, Task
from pefll.tasks.checking import bound_task, check_figures, check_loss, check_predictions
from pefll.tasks.names import inferred, name_of, named_again, task_of


def describe_problem(
    federation: Federation, model: str | nn.Module, task: Task | None = None
) -> tuple[Problem, ModelSpec]:
    """Return the learning problem of a federation, and the spec of its model; by default the task fits the labels."""
    shape, classes, tokens = federation.input_shape, federation.classes, federation.tokens
    bound = bound_task(task or inferred(federation), federation)
    name = resolve_model(model, shape, tokens) if isinstance(model, str) else ""
    network = Network(model if isinstance(model, nn.Module) else build_checked_model(name, shape, bound.outputs))
    check_model(network, shape, bound.outputs, tokens, "class" if bound.outputs == classes else "")
    check_loss(bound, federation)
    check_figures(bound, federation)
    check_predictions(bound, federation)
    spec = ModelSpec(
        model=name,
        input_shape=shape,
        classes=classes,
        normalise=federation.normalise,
        tokens=tokens,
        class_names=federation.class_names,
        feature_names=federation.feature_names,
        table=federation.table.to_json() if federation.table else None,
        label_column=federation.label_column,
        client_column=federation.client_column,
        time_column=federation.time_column,
        num_clients=federation.num_clients,
        dataset=federation.name,
        weights=network.size,
        probe=probe(network, shape, tokens),
        task=name_of(bound) or None,
        outputs=None if bound.outputs == classes else bound.outputs,
        label_columns=federation.y.shape[1] if federation.y.dim() > 1 else None,
    )
    seen = federation.num_seen
    return Problem(network, shape, classes, federation.num_clients, tokens, bound, seen), spec


def trained_task(spec: ModelSpec, given: Any, path: str | Path) -> Task:
    """Return the task of what is at `path`, from its spec, or the one that a user has given."""
    if given is None:
        return task_of(spec.task) if spec.task else Classification(spec.classes)
    task: Task = named_again(given, spec.task or f"classification classes={spec.classes}")
    if task.outputs != spec.width:
        raise PefllError(
            f"{path} was trained with a task of {counted(spec.width, 'output')}, but yours has {task.outputs}; give "
            "the same task",
            code="PEFLL-T500",
        )
    return task


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


def checked_networks(
    settings: Mapping[str, Any], method: str, networks: dict[str, Any], path: str | Path
) -> dict[str, Any]:
    """Return the networks that a user gave for what is at `path`; PefllError if it was not trained with such networks.

    `settings` are the hyper-parameters of its training.
    """
    for name, given in networks.items():
        trained = settings.get(name, "")
        if name not in network_settings(method) or not own.is_own(trained):
            raise PefllError(
                f"{path} was not trained with an own {name}; leave out {name}={shown(given)}",
                code="PEFLL-N548",
            )
        if not isinstance(given, str) and not own.is_given(given):
            raise PefllError(
                f"{name} is {shown(given)}; give a torch.nn.Module, a function that builds one, or a name",
                code="PEFLL-N549",
            )
    return networks
