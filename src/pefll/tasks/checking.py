"""Checks of a task before training: its loss for one batch, the gradient, and its metrics; and its fingerprint."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.core import randomness
from pefll.core.arguments import shown
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.plugins import fault
from pefll.data.client import Batch
from pefll.data.federation import Federation
from pefll.tasks.classification import Score, is_cross_entropy
from pefll.tasks.contract import Task
from pefll.tasks.metrics import check_name
from pefll.tasks.own import ask, check_predicted, check_values, is_own, lacks, missing, wrong
from pefll.tasks.sums import (
    Layout,
    check_bounds,
    check_same_names,
    check_widths,
    explained_sums,
    figures_of,
    given_figures,
    layout_of,
    metric_not_finite,
    rows_of,
)


def loss_of(task: Task) -> str:
    """Return the loss of a task in words, with the name of the user's own function."""
    own: Any = getattr(task, "own_loss", None)
    name = type(task).__name__
    return f"the loss of the task {name}" if own is None else f"own_loss {called(own)} of the task {name}"


def own_loss_of(task: Task) -> str:
    """Return a user's own loss in words; "" for a loss of this package."""
    return loss_of(task) if is_own(task) or getattr(task, "own_loss", None) is not None else ""


def called(function: Any) -> str:
    """Return the name of a function, or that of the class of another object."""
    return str(getattr(function, "__name__", type(function).__name__))


def bound_task(task: Task, data: Federation) -> Task:
    """Return a task bound to a federation; PefllError if one of its parts has another type than it must have."""
    bound: Any = ask(task, "bind", data)
    if lacks(bound):
        raise wrong(task, "bind", bound)
    if is_own(bound):
        check_values(bound)
        if (found := ask(bound, "check", data)) is not None:
            raise wrong(bound, "check", found)
    return bound  # type: ignore[no-any-return]


def check_loss(task: Task, federation: Federation) -> None:
    """Raise PefllError if a task's loss of some samples is not one number per sample, with a gradient."""
    if is_cross_entropy(task) or not len(federation.rows):
        return
    loss_ = loss_of(task)
    name = type(task).__name__
    y = _labels(task, federation)
    output = _outputs(task, len(y)).requires_grad_()
    try:
        with torch.enable_grad():
            loss: Any = task.loss(output, y)
            is_vector = isinstance(loss, Tensor) and loss.shape == (len(y),)
            learns = is_vector and loss.requires_grad
            gradient = torch.autograd.grad(loss.sum(), output)[0] if learns else None
        encoded = task.encode(y)
    except Exception as error:  # a user's code may raise anything
        if isinstance(error, NotImplementedError) and not str(error):
            raise missing(task, "loss") from error
        raise PefllError(
            f"{loss_} failed for outputs {list(output.shape)} and labels {list(y.shape)}: "
            f"{fault(error) or first_line(error)}",
            code="PEFLL-S522",
        ) from error
    if not is_vector:
        found = list(loss.shape) if isinstance(loss, Tensor) else shown(loss)
        raise PefllError(
            f"{loss_} returned {found} for {len(y)} samples; it must return a tensor with one number per sample, [b]; "
            f"{_shape_advice(loss, len(y))}",
            code="PEFLL-S523",
        )
    # A few samples may have no gradient, as a hinge loss has none for good outputs.
    if gradient is None or (len(y) >= ENOUGH and not gradient.any()):
        raise PefllError(
            f"{loss_} has no gradient, so nothing would be learned; compute it from `output` in torch, without "
            "detach, rounding or comparisons",
            code="PEFLL-S663",
        )
    if loss.dtype != output.dtype:
        raise PefllError(
            f"{loss_} returned {loss.dtype} for outputs of {output.dtype}; end with .to(output.dtype)",
            code="PEFLL-S664",
        )
    fine = torch.isfinite(loss) & torch.isfinite(gradient).all(dim=1)
    if not fine.all():
        raise PefllError(
            f"{loss_} has a NaN or infinite value or gradient for ordinary outputs and the label "
            f"{_label(y[int(fine.int().argmin())])}; correct it",
            code="PEFLL-S524",
        )
    if not isinstance(encoded, Tensor) or encoded.shape != (len(y), task.encoded):
        found = list(encoded.shape) if isinstance(encoded, Tensor) else shown(encoded)
        columns = encoded.shape[1] if isinstance(encoded, Tensor) and encoded.dim() == 2 else 0
        fits = isinstance(encoded, Tensor) and len(encoded) == len(y) and columns
        raise PefllError(
            f"encode of the task {name} returned {found} for {len(y)} samples; it must return [b, {task.encoded}], as "
            f"its attribute `encoded` says{f'; or set encoded = {columns}' if fits else ''}",
            code="PEFLL-S525",
        )


def _shape_advice(loss: Any, samples: int) -> str:
    """Return how to make a loss of another shape one number per sample."""
    if not isinstance(loss, Tensor):
        return "compute it in torch"
    if loss.shape == (samples, samples):
        return "it compares each sample with all others, so give output[:, 0] the shape of y"
    return "average over its columns, such as loss.mean(dim=1)" if loss.dim() > 1 else "do not average over samples"


def check_figures(task: Task, federation: Federation) -> None:
    """Raise PefllError if a task's sums are no sums, or if its metrics of them have no names or are no numbers."""
    layout = layout_of(task, federation.y, federation.classes)
    check_widths(task, federation.y, federation.classes)
    rows = [np.ones(layout.width)]
    if len(federation.rows):
        y = _labels(task, federation)
        rows.append(_measured(task, _outputs(task, len(y)), y, federation.classes))
        _check_finite_sums(task, layout, y, federation.classes)
        _check_bounds(task, layout, y, federation.classes)
    names: tuple[str, ...] = ()
    for row in rows:
        figures = given_figures(task, layout.sums(row))
        for name in figures:
            check_name(name)
        check_same_names(task, figures, names or tuple(figures))
        names = tuple(figures)
    if len(rows) > 1 and is_own(task):
        _check_finite_figures(task, figures)
    if unknown_errors := [name for name in task.errors if name not in (*figures, *_KNOWN_ERRORS)]:
        raise unknown(f"metric among the errors of the task {type(task).__name__}", unknown_errors[0], figures)


# Names that `errors` may have without such a figure: a task may leave the loss out of its metrics.
_KNOWN_ERRORS = ("loss",)


def _check_finite_sums(task: Task, layout: Layout, y: Tensor, classes: int) -> None:
    """Raise PefllError if a sum is not finite for ordinary outputs; the sentence names the first such label."""
    output = _outputs(task, len(y))
    if np.isfinite(_measured(task, output, y, classes)).all():
        return
    for place in range(len(y)):
        row = _measured(task, output[place : place + 1], y[place : place + 1], classes)
        if not np.isfinite(row).all():
            raise metric_not_finite(layout, row, f"ordinary outputs and the label {_label(y[place])}")


def _check_bounds(task: Task, layout: Layout, y: Tensor, classes: int) -> None:
    """Raise PefllError if a metric of ordinary outputs is outside of its bounds; the sentence names such a label."""
    if not task.bounds().keys() - set(Score._fields):  # those of a `Score` are certain
        return
    output, few = _outputs(task, len(y)), range(0, len(y), math.ceil(len(y) / _SINGLE))
    rows = [_measured(task, output[place : place + 1], y[place : place + 1], classes) for place in few]
    rows.append(_measured(task, output, y, classes))
    labels = [f"the label {_label(y[place])}" for place in few] + ["some labels"]
    check_bounds(task, layout, np.stack(rows), lambda row: f"ordinary outputs and {labels[row]}")


def _check_finite_figures(task: Task, figures: dict[str, float]) -> None:
    """Raise PefllError if a metric of ordinary outputs is infinite, or if the first one is not defined."""
    for place, (name, value) in enumerate(figures.items()):
        if math.isinf(value) or (place == 0 and math.isnan(value)):
            why = "no round could be the best one" if place == 0 else "tables could not show it"
            raise PefllError(
                f"the metric {name!r} of the task {type(task).__name__} is {value} for ordinary outputs, so {why}; "
                "return a finite number from its metrics",
                code="PEFLL-S665",
            )


def direction_note(task: Task, federation: Federation) -> str:
    """Return a sentence if the first metric of a user's own task gets worse while its loss falls; else "".

    That is so if an error is not named in `errors`: then the best round would be the worst one. Artificial outputs take
    some steps along the gradient of the loss.
    """
    if not is_own(task) or not len(federation.rows):
        return ""
    try:
        name, before, after = _first_metric_along_gradient(task, federation)
    except Exception:  # noqa: BLE001 - a user's loss may reject such outputs, and this is only a note
        return ""
    is_error = name in task.errors
    if not (after > before if is_error else after < before):
        return ""
    moves, counts = ("rises", "smaller") if is_error else ("falls", "larger")
    advice = "take it out of" if is_error else "give the metric smaller_is_better=True, or name it in"
    return (
        f"the metric {name!r} of the task {type(task).__name__} {moves} while the loss falls, but {counts} values "
        f"count as better; if they are worse, {advice} the task's `errors`"
    )


def _first_metric_along_gradient(task: Task, federation: Federation) -> tuple[str, float, float]:
    """Return the name of a task's first metric, and its values before and after steps along the loss's gradient."""
    y = _labels(task, federation)
    layout, output = layout_of(task, federation.y, federation.classes), _outputs(task, len(y))
    values, losses, name = list[float](), list[float](), ""
    for step in range(_STEPS + 1):
        output.requires_grad_()
        with torch.enable_grad():
            loss = task.loss(output, y).sum()
        (slope,) = torch.autograd.grad(loss, output)
        output = output.detach()
        losses.append(float(loss.detach()))
        if step in (0, _STEPS):
            figures = figures_of(task, layout.sums(_measured(task, output, y, federation.classes)))
            name = next(iter(figures))
            values.append(figures[name])
        output = output - 0.1 * slope / slope.abs().max().clamp(min=1e-12)
    fell = losses[-1] < losses[0] - 0.01 * abs(losses[0])
    return name, values[0], values[1] if fell else math.nan


def check_predictions(task: Task, federation: Federation) -> None:
    """Raise PefllError if a user's own task does not predict something for each of some outputs."""
    if is_own(task):
        names = federation.classes or math.prod(federation.y.shape[1:])
        # No axis has the length of another.
        check_predicted(task, _outputs(task, max(task.outputs, names) + 2), names)


def _labels(task: Task, federation: Federation) -> Tensor:
    """Return the labels of some samples, [b, ...]. b is not the number of outputs, so that no axis is confused."""
    rows = federation.rows
    some = rows[torch.linspace(0, len(rows) - 1, min(len(rows), MOST_CHECKED)).round().long()]
    y = federation.y[some.to(federation.y.device)].cpu()
    return y[:-1] if len(y) == task.outputs > 1 else y


def _label(y: Tensor) -> str:
    """Return a label as text for a sentence."""
    return f"{float(y):.6g}" if not y.dim() else shown(y.tolist())


def _outputs(task: Task, samples: int) -> Tensor:
    """Return ordinary outputs [samples, outputs], between -1 and 1."""
    return torch.arange(1.0, samples * task.outputs + 1).mul(1.3).sin().view(samples, task.outputs)


def _measured(task: Task, output: Tensor, y: Tensor, classes: int) -> Any:
    """Return the sums of a task for a batch as a row, float64 [width]."""
    known = torch.ones(classes, dtype=torch.bool) if classes else None
    with explained_sums(task):
        sums: Any = task.measure(output, Batch(output, y, torch.ones(len(y))), known)
        return rows_of(type(sums)(*(part[None] for part in sums)))[0].numpy()


MOST_CHECKED = 256  # samples whose loss and metrics are checked before training
_SINGLE = 32  # most of them that are measured one by one
ENOUGH = 16  # samples of which some must have a gradient
_STEPS = 30  # along the gradient of the loss
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
                output = _outputs(bound, _SAMPLES)
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
