"""Checks of a task before training: its loss for one batch, the gradient, and its metrics; and its fingerprint."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.core import randomness
from pefll.core.arguments import shown
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault
from pefll.data.client import Batch
from pefll.data.federation import Federation
from pefll.tasks.classification import is_cross_entropy
from pefll.tasks.contract import Task
from pefll.tasks.metrics import check_name
from pefll.tasks.sums import figures_of, layout_of, rows_of


def loss_of(task: Task) -> str:
    """Return the loss of a task in words, with the name of the user's own function."""
    own: Any = getattr(task, "own_loss", None)
    name = type(task).__name__
    return f"the loss of the task {name}" if own is None else f"own_loss {called(own)} of the task {name}"


def called(function: Any) -> str:
    """Return the name of a function, or that of the class of another object."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_loss(task: Task, federation: Federation) -> None:
    """Raise PefllError if a task's loss of some samples is not one number per sample, with a gradient."""
    if is_cross_entropy(task) or not len(federation.rows):
        return
    loss_ = loss_of(task)
    name = type(task).__name__
    y = federation.y[federation.rows[:2].to(federation.y.device)].cpu()
    output = torch.linspace(-1, 1, len(y) * task.outputs).reshape(len(y), task.outputs).requires_grad_()
    try:
        with torch.enable_grad():
            loss: Any = task.loss(output, y)
            is_vector = isinstance(loss, Tensor) and loss.shape == (len(y),)
            gradient = torch.autograd.grad(loss.sum(), output)[0] if is_vector else None
        encoded = task.encode(y)
    except Exception as error:  # a user's code may raise anything
        raise PefllError(
            f"{loss_} failed for a batch: {fault(error) or first_line(error)}", code="PEFLL-S522"
        ) from error
    if gradient is None:
        found = list(loss.shape) if isinstance(loss, Tensor) else shown(loss)
        raise PefllError(
            f"{loss_} returned {found} for {len(y)} samples; it must return one number per sample, "
            "[b]; do not average over samples",
            code="PEFLL-S523",
        )
    if not torch.isfinite(loss).all() or not torch.isfinite(gradient).all():
        raise PefllError(
            f"{loss_} has a NaN or infinite value or gradient for ordinary outputs; correct it",
            code="PEFLL-S524",
        )
    if not isinstance(encoded, Tensor) or encoded.shape != (len(y), task.encoded):
        found = list(encoded.shape) if isinstance(encoded, Tensor) else shown(encoded)
        raise PefllError(
            f"encode of the task {name} returned {found} for {len(y)} samples; it must return [b, {task.encoded}], as "
            "its attribute `encoded` says",
            code="PEFLL-S525",
        )


def check_figures(task: Task, federation: Federation) -> None:
    """Raise PefllError if a task's sums are no sums, or if its metrics of them have no names or are no numbers."""
    layout = layout_of(task, federation.y, federation.classes)
    rows = [np.ones(layout.width)]
    if len(federation.rows):
        y = federation.y[federation.rows[:2].to(federation.y.device)].cpu()
        output = torch.linspace(-1, 1, len(y) * task.outputs).reshape(len(y), task.outputs)
        known = torch.ones(federation.classes, dtype=torch.bool) if federation.classes else None
        sums: Any = task.measure(output, Batch(output, y, torch.ones(len(y))), known)
        rows.append(rows_of(type(sums)(*(part[None] for part in sums)))[0].numpy())
    for row in rows:
        for name in figures_of(task, layout.sums(row)):
            check_name(name)


_SAMPLES = 4  # of a probe, for each scale
_SCALES = (0.3, 3.0, 30.0)  # of the outputs of a probe, to tell losses that differ only for small or large errors


def probe(task: Task, federation: Federation) -> list[float | None]:
    """Return the losses and metrics of a task for artificial outputs and labels; empty if they cannot be computed.

    Two tasks with the same text may have other functions, for example two lambdas. These numbers tell them apart. They
    depend on the kind and number of labels, but not on the labels themselves, which other seeds divide otherwise.
    """
    try:
        data = _artificial(federation)
        bound = task.bind(data)
        layout, found = layout_of(bound, data.y, data.classes), list[float]()
        known = torch.ones(data.classes, dtype=torch.bool) if data.classes else None
        with randomness.initial_weights(0, "example"), torch.no_grad():
            for scale in _SCALES:
                output = torch.arange(1.0, _SAMPLES * bound.outputs + 1).mul(1.3).sin().view(_SAMPLES, bound.outputs)
                found += bound.loss(scale * output, data.y).tolist()
                sums: Any = bound.measure(scale * output, Batch(data.x, data.y, torch.ones(_SAMPLES)), known)
                row = rows_of(type(sums)(*(part[None] for part in sums)))[0].numpy()
                found += figures_of(bound, layout.sums(row)).values()
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in found]
    except Exception:  # noqa: BLE001 - a user's code may reject such samples
        return []


def _artificial(federation: Federation) -> Federation:
    """Return a federation of one client with artificial samples, whose labels have the kind of another federation."""
    shape = (_SAMPLES, *federation.y.shape[1:])
    numbers = torch.arange(math.prod(shape)).view(shape)
    classes = federation.classes
    y = numbers % classes if classes else numbers.double().mul(0.7).sin().to(federation.y.dtype)
    if federation.labels == "sets":
        y = (numbers % 3 == 0).to(federation.y.dtype)
    return Federation(
        x=torch.zeros((_SAMPLES, *federation.input_shape), dtype=federation.x.dtype),
        y=y.to(federation.y.dtype),
        rows=torch.arange(_SAMPLES),
        offset=torch.tensor([[0], [_SAMPLES], [_SAMPLES]]),
        count=torch.tensor([[_SAMPLES], [0], [0]]),
        num_seen=1,
        classes=classes,
        normalise=federation.normalise,
        tokens=federation.tokens,
        name=federation.name,
        class_names=federation.class_names,
    )
