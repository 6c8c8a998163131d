"""Tasks by name: as text in settings and files, and the task that fits labels."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pefll.core.arguments import shown
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.plugins import allow, check_allowed, fault, import_name
from pefll.core.wording import argument, either
from pefll.data.federation import Federation
from pefll.data.samples import BOOLEANS
from pefll.tasks.classification import Classification
from pefll.tasks.contract import Task
from pefll.tasks.metrics import Metric
from pefll.tasks.multilabel import MultiLabel
from pefll.tasks.own import KINDS, attribute, lacks, wrong
from pefll.tasks.regression import Regression
from pefll.tasks.settings import check_has_names, differing, place_of, settings_in, text_of, words_of

TASKS: dict[str, Any] = {"classification": Classification, "regression": Regression, "multilabel": MultiLabel}
# Settings that only training and evaluation need; a personal model works without them, and without the user's code.
_TRAINING = (
    *("label_smoothing", "class_weights", "focal", "loss_name", "delta", "positive_weights", "standardise"),
    *("own_loss", "extra"),
)
# Settings that `bind` takes from the data.
_TAKEN = ("classes", "members", "mean", "deviation")


def checked_task(task: Any) -> Task | None:
    """Return a task that a user gave as a value, a class or a text; None for none. PefllError for anything else."""
    if task is None or (isinstance(task, str) and not task.strip()):
        return None
    if isinstance(task, str):
        return task_of(task)
    if isinstance(task, type):
        task = _made(task, {})
    if lack := lacks(task):
        raise PefllError(
            f"the task is {shown(task)}, which has no {lack}; extend pefll.BaseTask, or take pefll.Classification, "
            "pefll.Regression or pefll.MultiLabel",
            code="PEFLL-S518",
        )
    if (labels := attribute(task, "labels")) not in KINDS:
        raise wrong(task, "labels", labels)
    return task  # type: ignore[no-any-return]


def _made(kind: Any, settings: dict[str, Any]) -> Any:
    """Return a task of a user's class; PefllError if it cannot be made with these settings."""
    try:
        return kind(**settings)
    except PefllError:
        raise
    except Exception as error:  # a user's code may raise anything
        why = fault(error) or first_line(error)
        raise PefllError(
            f"the task {kind.__name__} cannot be made: {why}; give each setting a default, or give a task with its "
            f"settings, such as {either(f'{kind.__name__} NAME=VALUE', f'{kind.__name__}(name=value)')}",
            code="PEFLL-S666",
        ) from error


def task_of(text: str, *, for_predictions: bool = False) -> Task:
    """Return the task in a text such as `"regression loss_name=huber"` or `"my.module:Task"`.

    Args:
        text: a key of `TASKS` or a user's own class or value, then settings NAME=VALUE.
        for_predictions: whether the task only makes predictions. Then the settings of training are left out, so that a
            file cannot name code in them.
    """
    name, *words = words_of(text)
    without = _TRAINING if for_predictions and ":" not in name else ()
    needed = [word for word in words if word.partition("=")[0] not in without]
    check_has_names(needed)
    _check_named(name, needed)
    if ":" in name:
        kind = _own_kind(name)
        task = _made(kind, settings_in(words, kind)) if isinstance(kind, type) else kind
        found = checked_task(task)
        assert found is not None
        return found
    if name not in TASKS:
        raise unknown("task", name, [*TASKS, "your.module:Class"])
    return TASKS[name](**settings_in(words, TASKS[name], without))  # type: ignore[no-any-return]


def _check_named(name: str, words: Sequence[str]) -> None:
    """Raise PefllError if the user did not name all code in the text of a task; it advises a text that does."""
    asked = " ".join([name, *(word for word in words if word.partition("=")[0] not in _TAKEN)])
    check_allowed(code_in(asked), "task", argument("task", asked))


def _own_kind(name: str) -> Any:
    """Return a user's class or value that a text names as a task; PefllError for a loss or a metric."""
    found = None if "," in name and "(" not in name else import_name(name, "task")
    if found is None or inspect.isfunction(found) or isinstance(found, Metric):
        raise PefllError(
            f"{name!r} names no task: a loss or a metric is a setting of a task, as in "
            f"{argument('task', 'classification own_loss=module:function extra=module:metric')}",
            code="PEFLL-S518",
        )
    return found


def code_in(text: str) -> list[str]:
    """Return the names of a user's own code in the text of a task, for `plugins.allow`."""
    values = (part for word in words_of(text) for part in word.rpartition("=")[2].split(","))
    return [value for value in values if ":" in value]


def allow_task(task: Any) -> None:
    """Allow the import of the code that a user names in the text of a task."""
    if isinstance(task, str):
        allow(*code_in(task))


def name_of(task: Task | None) -> str:
    """Return a task as text for the settings of a run; "" for none, and for plain classification.

    Code that cannot be imported by name, such as a lambda, has a text that nobody can read back.
    """
    if task is None:
        return ""
    names = {kind: name for name, kind in TASKS.items()}
    kind = type(task)
    if kind is Classification and task == Classification(task.outputs):
        return ""
    if kind in names:
        return text_of(task, names[kind])
    place = f"{kind.__module__}:{kind.__qualname__}"
    return text_of(task, place_of(kind) or place)


def asked_text(task: Task | None, data: Federation) -> str:
    """Return the text of a task for a run's settings: without what it takes from the data.

    A task that labels would give anyway is written too, but not plain classification.
    """
    found = task or inferred(data)
    if isinstance(found, Classification) and found.classes == data.classes:
        found = replace(found, classes=0)
    if isinstance(found, MultiLabel) and found.positive_weights == () and found.members:
        found = replace(found, members=0)
    return name_of(found)


def task_text(text: str) -> str:
    """Return the text of a task as a run's settings have it."""
    return name_of(checked_task(text))


def inferred(data: Federation) -> Task:
    """Return the task that fits the labels: classification, regression or multi-label."""
    kinds: dict[str, Any] = {kind.labels: kind for kind in TASKS.values()}
    return kinds[data.labels]()  # type: ignore[no-any-return]


def resolve_task(task: Any, data: Federation) -> tuple[Task, Federation, str]:
    """Return the task that a user asked for, or that fits the labels, with the data as it needs it, and its text."""
    found = checked_task(task) or inferred(data)
    data = with_labels_of(found, data)
    return found, data, asked_text(found, data)


def with_labels_of(task: Task, data: Federation) -> Federation:
    """Return a federation with the labels of a task: whole numbers, True and False become numbers if it needs these."""
    are_texts = data.labels == "classes" and data.class_names not in ((), BOOLEANS)
    if task.labels != "numbers" or data.labels == "numbers" or are_texts:
        return data
    names = () if data.labels == "classes" else data.class_names
    return replace(data, y=data.y.to(torch.float32), classes=0, class_names=names)


def named_again(given: Any, text: str) -> Task:
    """Return the task in a file's text, whose code a user has named, or else the task that the user gives instead.

    What the task in the file has taken from its data is taken over.
    """
    if isinstance(given, str) and text.split()[:1] == [given.strip()]:
        return task_of(text)
    task = checked_task(given)
    assert task is not None
    fields: set[str] = {each.name for each in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else set()
    words = [word for word in text.split()[1:] if word.partition("=")[0] in fields.intersection(_TAKEN)]
    settings: dict[str, Any] = settings_in(words, type(task)) if dataclasses.is_dataclass(task) else {}
    unset = {name: value for name, value in settings.items() if not getattr(task, name)}
    return replace(task, **unset) if unset else task  # type: ignore[type-var]


def other_settings(task: Task, text: str) -> list[str]:
    """Return the names of the settings in which a task differs from the text of another."""
    return differing(text, name_of(task))


def labels_for(text: str) -> str:
    """Return what labels must be for the task in a text; "auto" without a task."""
    if not text:
        return "auto"
    name, *words = words_of(text)
    if ":" not in name and name not in TASKS:
        raise unknown("task", name, [*TASKS, "your.module:Class"])
    if ":" in name:
        _check_named(name, words)
    kind = _own_kind(name) if ":" in name else TASKS[name]
    return str(getattr(kind, "labels", "auto"))
