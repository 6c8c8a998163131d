"""Calls of a user's own task. What goes wrong there becomes one sentence with the task's class and the method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pefll.core.arguments import plain, shown
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault

KINDS = ("classes", "numbers", "sets")  # of labels
# What a task's methods must return, and what its attributes must be.
EXPECTED = {
    "labels": "be 'classes', 'numbers' or 'sets'",
    "outputs": "be the number of a model's outputs per sample, such as outputs = 1, or a property that returns it",
    "encoded": "be the length of an encoded label, such as encoded = 1, or a property that returns it",
    "errors": "be a tuple with the names of the metrics that are better when smaller, such as ('loss',)",
    "measured": "be a tuple of pefll.Metric, such as (metric,)",
    "bind": "return the task for the data, such as `return self`",
    "check": "return nothing, and raise pefll.PefllError(sentence, code) for labels that do not fit",
    "encode": "return a float tensor [b, encoded]",
    "loss": "return one number per sample, [b]",
    "bounds": "return a dict of names and pairs (smallest, largest)",
    "predict": "return a tensor with one row per sample",
    "probabilities": "return a float tensor [b, k] with a probability for each class or member, or None",
}
_PREDICTED = {
    "classes": "return the class of each sample as whole numbers [b], such as output.argmax(dim=1)",
    "sets": "return True for each member, [b, k], such as output > 0",
    "numbers": EXPECTED["predict"] + ", such as output[:, 0]",
}


# What every task has.
_NEEDED = (
    *("labels", "outputs", "encoded", "errors", "bind", "check", "encode", "loss", "measure", "metrics", "bounds"),
    "predict",
)


def lacks(task: Any) -> str:
    """Return the name of the first part that an object lacks to be a task; "" if it has all."""
    return next((name for name in _NEEDED if not hasattr(type(task), name) and not hasattr(task, name)), "")


def is_own(task: Any) -> bool:
    """Return whether a task is of a user's own class."""
    return not type(task).__module__.startswith("pefll.")


def attribute(task: Any, name: str) -> Any:
    """Return an attribute or a property of a task; PefllError if it is missing or fails."""
    try:
        return getattr(task, name)
    except PefllError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise _failed(task, name, error) from error


def ask(task: Any, method: str, *arguments: Any) -> Any:
    """Return what a method of a task returns; PefllError with the names of both if it fails."""
    try:
        return getattr(task, method)(*arguments)
    except PefllError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise _failed(task, method, error) from error


def _failed(task: Any, name: str, error: Exception) -> PefllError:
    """Return the error for an attribute or a method that raised an exception."""
    kind = type(task).__name__
    if isinstance(error, NotImplementedError) and not str(error):
        return missing(task, name)
    why = fault(error) or f"{type(error).__name__}: {first_line(error)}"
    advice = f"it must {EXPECTED[name]}"
    if name == "bind" and "__init__() got an unexpected keyword argument" in str(error):  # of dataclasses.replace
        advice = (
            f"make {kind} a frozen dataclass (@dataclass(frozen=True)) with its settings as fields, or let its "
            "__init__ pass this argument on"
        )
    return PefllError(f"{name} of the task {kind} failed: {why}; {advice}", code="PEFLL-S661")


def missing(task: Any, name: str) -> PefllError:
    """Return the error for a part that a subclass of `BaseTask` does not define."""
    return PefllError(
        f"the task {type(task).__name__} does not define {name}, which must {EXPECTED[name]}", code="PEFLL-S660"
    )


def wrong(task: Any, name: str, found: Any, must: str = "") -> PefllError:
    """Return the error for what an attribute is, or for what a method returned."""
    kind, verb = type(task).__name__, "returned" if EXPECTED[name].startswith("return") else "is"
    what = name if verb == "returned" else f"the attribute {name}"
    given = f"a tensor {list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else shown(found)
    return PefllError(f"{what} of the task {kind} {verb} {given}; it must {must or EXPECTED[name]}", code="PEFLL-S662")


def check_values(task: Any) -> None:
    """Raise PefllError if an attribute of a bound task has another type than it must have."""
    for name, least in (("outputs", 1), ("encoded", 0)):
        size = plain(attribute(task, name))
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise wrong(task, name, size)
    errors = attribute(task, "errors")
    if not isinstance(errors, tuple | list) or not all(isinstance(each, str) for each in errors):
        raise wrong(task, "errors", errors)
    bounds = ask(task, "bounds")
    if not isinstance(bounds, dict) or not all(isinstance(pair, tuple | list) for pair in bounds.values()):
        raise wrong(task, "bounds", bounds)


def predictions(task: Any, output: Tensor, classes: int) -> Tensor:
    """Return the predictions of a task for outputs [b, outputs]; PefllError unless there is one for each sample.

    If labels are classes, predictions must be from 0 to `classes` - 1.
    """
    found = ask(task, "predict", output)
    labels = task.labels
    fits = isinstance(found, Tensor) and found.dim() > 0 and len(found) == len(output)
    if fits and labels == "classes":
        fits = found.dim() == 1 and not found.dtype.is_floating_point and found.dtype != torch.bool
    if fits and labels == "sets":
        fits = found.dim() == 2 and found.dtype == torch.bool
    if not fits:
        raise wrong(task, "predict", found, _PREDICTED[labels])
    if labels == "classes":
        strange = found[(found < 0) | (found >= classes)]
        if len(strange):
            raise PefllError(
                f"predict of the task {type(task).__name__} returned the class {int(strange[0])}; it must return "
                f"classes from 0 to {classes - 1}, for example with .clamp(0, {classes - 1})",
                code="PEFLL-S669",
            )
    return found  # type: ignore[no-any-return]


def probabilities(task: Any, output: Tensor) -> Tensor | None:
    """Return a task's probabilities of classes or members for outputs [b, outputs], float [b, k]; None without any."""
    found = ask(task, "probabilities", output) if hasattr(task, "probabilities") else None
    if found is None:
        return None
    fits = isinstance(found, Tensor) and found.dim() == 2 and len(found) == len(output) and found.is_floating_point()
    if not fits:
        raise wrong(task, "probabilities", found)
    return found  # type: ignore[no-any-return]


def check_predicted(task: Any, output: Tensor, names: int) -> None:
    """Raise PefllError unless a task predicts something for outputs [b, outputs].

    Its predictions and probabilities must be of `names` classes or members.
    """
    predictions(task, output, names)
    found = probabilities(task, output)
    if found is not None and (task.labels == "numbers" or found.shape[1] != names):
        numbers = "return None, because numbers have no probabilities"
        columns = f"return [b, {names}], one column for each class or member"
        raise wrong(task, "probabilities", found, numbers if task.labels == "numbers" else columns)
