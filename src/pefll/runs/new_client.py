"""The samples of a new client: read as the training data was, and as a federation of this one client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pefll.core.errors import PefllError
from pefll.core.warning import warn
from pefll.core.wording import counted, either
from pefll.data.arrays import blank_labels, labels_of
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.frames import columns as columns_of
from pefll.data.frames import inputs_of, is_frame, label_names, labels_in
from pefll.data.missing_labels import labelled
from pefll.data.owners import Columns, Name, Owned, clients_in, features_in, names_of_owners
from pefll.data.samples import Normalise, Samples, check_classes
from pefll.methods.contract import Method
from pefll.models.spec import ModelSpec
from pefll.runs.personal import check_input, warn_of_positions
from pefll.tasks import Task
from pefll.tasks.own import ask


class NewClient(NamedTuple):
    """A new client's samples [m, ...], in the type and layout of the training data, and its labels [m] or None.

    `unlabelled` says in words why there are no labels, or is empty. `name` is the client's name in the table, or None.
    """

    x: Any
    y: Any
    unlabelled: str = ""
    name: Name | None = None


def read_new_client(
    x: Any, y: Any, columns: Columns, spec: ModelSpec, uses_labels: bool, instead: str = ""
) -> NewClient:
    """Return a new client's samples and labels.

    Samples without a label are left out with a warning if the method uses labels; see `missing_labels.labelled`.

    Args:
        x: [m, ...] samples, or a table.
        y: [m] labels, of which some may be missing; None for no labels, or for labels in the table.
        columns: names of a table's columns.
        spec: of the run's models.
        uses_labels: whether the method uses labels.
        instead: what else a user can do with a table of several clients; `{!r}` stands for its column of clients.
    """
    unlabelled, name = "", None
    if is_frame(x):
        named = label_names(columns.label, columns_of(x))
        lacking = [each for each in named if each not in columns_of(x)]
        x, y, name = _from_frame(x, y, columns, spec, instead)
        if y is None:
            unlabelled = f"the table has no column {lacking[0]!r}" if lacking else f"{columns.label!r} holds no label"
    x, found, left_out = labelled(check_input(x, spec), y, uses_labels)
    if left_out:
        warn(unlabelled_words(left_out, left_out + len(x)))
    if found is None and y is not None:
        unlabelled = f"none of the {counted(len(x), 'sample')} has a label"
    return NewClient(x, found, unlabelled, name)


def labelled_clients(owned: Sequence[Owned], uses_labels: bool) -> tuple[list[Owned], str]:
    """Return clients with the samples and labels that a method can use, and a sentence on what was left out, or ""."""
    total, left_out, kept = 0, 0, []
    for one in owned:
        x, y, without = labelled(one.x, one.y, uses_labels)
        # If none has a label, they all stay, so that the client's own error can say so.
        kept.append(one._replace(x=x, y=y) if y is not None or not uses_labels else one)
        left_out, total = left_out + without, total + len(one.x)
    return kept, unlabelled_words(left_out, total) if left_out else ""


def unlabelled_words(left_out: int, samples: int) -> str:
    """Return the sentence that says how many of a number of samples were left out because they have no label."""
    return f"{left_out:,} of {counted(samples, 'sample')} left out: without a label, this run cannot use them"


def federation_of_new_client(x: Any, y: Any, spec: ModelSpec, task: Task) -> Federation:
    """Return a federation whose only client is new.

    Args:
        x: samples from `read_new_client`.
        y: labels from `read_new_client`, or None.
        spec: of the run's models.
        task: what the run has learned.
    """
    if y is None:
        labels = blank_labels(task.labels, len(x), spec.label_columns)
    else:
        name = f"the column {spec.label_column!r} of labels" if spec.label_column else "y"
        labels = labels_of(y, spec.class_names, name, task.labels)
        if spec.classes and len(labels):
            check_classes(labels, name, spec.classes)
    samples = Samples(
        x=x,
        y=labels,
        classes=spec.classes,
        normalise=Normalise(*spec.normalise) if spec.normalise else None,
        name="the new client",
        tokens=spec.tokens,
    )
    one = one_client(samples, num_seen=0)
    if not spec.classes:
        ask(task, "check", one)
    if y is None and task.labels != "numbers":
        one = dataclasses.replace(one, y=torch.full_like(one.y, -1))  # -1 is no class; 0 would be the first class
    return one


def one_client(samples: Samples, num_seen: int) -> Federation:
    """Return a federation of one client that has these samples for training."""
    zeros = np.zeros(len(samples.x), dtype=np.int64)
    return assemble(samples, zeros, zeros.astype(np.int8), num_seen, "one client")


def dtype_of(precision: str) -> torch.dtype:
    """Return the type of weights and inputs of a run with this precision, when it makes models for new clients."""
    return torch.float64 if precision == "float64" else torch.float32


def check_labels(client: NewClient, method: Method[Any], spec: ModelSpec) -> None:
    """Raise PefllError if a client has no labels although the method needs them."""
    if client.y is not None or not method.uses_labels:
        return
    if client.unlabelled.startswith("the table"):
        raise PefllError(
            f"{client.unlabelled} with labels, which this run needs; rename the column of labels, or give the labels "
            "as y",
            code="PEFLL-M056",
        )
    kind = "lstm" if spec.tokens else "convnet" if len(spec.input_shape) == 3 else "mlp"
    words = either(
        f"--method pefll --set embedding={kind}-unlabeled",
        f"pefll.fit(federation, 'pefll', embedding='{kind}-unlabeled')",
    )
    why = f"{client.unlabelled}, but " if client.unlabelled else ""
    raise PefllError(
        f"{why}this run needs labels to personalise; {'label some, or ' if why else ''}train a run that needs none "
        f"with {words}, which is less accurate for clients that do have labels",
        code="PEFLL-T122",
    )


def _from_frame(frame: Any, y: Any, columns: Columns, spec: ModelSpec, instead: str) -> tuple[Any, Any, Name | None]:
    """Return one client's samples, labels and name in a table; PefllError if the table has several clients."""
    # Without names of features, a column with the usual name of clients may be a feature.
    candidates = names_of_owners(columns.client, columns.features, named=not columns.features)
    labels = label_names(columns.label, columns_of(frame))
    column, clients = clients_in(frame, candidates, (*columns.features, *labels), "the table")
    if len(clients) > 1:
        raise PefllError(
            f"the table holds the samples of {len(clients):,} clients, by its column {column!r}; give the samples of "
            f"one client{instead and f', or {instead.format(column)}'}",
            code="PEFLL-M037",
        )
    y = labels_in(frame, columns.label, "the table", columns.class_names) if y is None else y
    if not columns.features:
        warn_of_positions()
    chosen = features_in(frame, columns, "the table")
    # A column with the usual name may be about something else, so it does not name the client.
    name = clients.pop() if clients and column == columns.client else None
    return inputs_of(frame, chosen, columns.plan, "the table", tokens=spec.tokens), y, name
