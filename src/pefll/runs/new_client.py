"""The samples of a new client: read as the training data was, and as a federation of this one client."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pefll.core.errors import PefllError
from pefll.core.wording import counted, either
from pefll.data.arrays import blank_labels, labels_of
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.frames import columns as columns_of
from pefll.data.frames import inputs_of, is_frame, label_names, labels_in
from pefll.data.missing_labels import labelled
from pefll.data.owners import Columns, Owned, features_in, find_owners, names_of_owners, number_of_clients
from pefll.data.samples import Normalise, Samples
from pefll.methods.contract import Method
from pefll.models.spec import ModelSpec
from pefll.runs.personal import check_input, warn_of_positions
from pefll.tasks import Task


def read_new_client(x: Any, y: Any, columns: Columns, spec: ModelSpec, uses_labels: bool) -> tuple[Any, Any]:
    """Return a new client's samples [m, ...], in the type and layout of the training data, and its labels or None.

    Samples without a label are left out with a warning if the method uses labels; see `missing_labels.labelled`.

    Args:
        x: [m, ...] samples, or a table.
        y: [m] labels, of which some may be missing; None for no labels, or for labels in the table.
        columns: names of a table's columns.
        spec: of the run's models.
        uses_labels: whether the method uses labels.
    """
    if is_frame(x):
        x, y = _from_frame(x, y, columns, spec)
    x, y, left_out = labelled(check_input(x, spec), y, uses_labels)
    if left_out:
        warnings.warn(unlabelled_words(left_out, left_out + len(x)), stacklevel=3)
    return x, y


def labelled_clients(owned: Sequence[Owned], uses_labels: bool) -> tuple[list[Owned], str]:
    """Return clients with the samples and labels that a method can use, and a sentence on what was left out, or ""."""
    total, left_out, kept = 0, 0, []
    for one in owned:
        x, y, without = labelled(one.x, one.y, uses_labels)
        kept.append(one._replace(x=x, y=y))
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
        labels = labels_of(y, spec.class_names, "y", task.labels)
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
        task.check(one)
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


def check_labels(y: Any, method: Method[Any], spec: ModelSpec) -> None:
    """Raise PefllError if there are no labels, y is None, although the method needs them."""
    if y is not None or not method.uses_labels:
        return
    kind = "lstm" if spec.tokens else "convnet" if len(spec.input_shape) == 3 else "mlp"
    words = either(
        f"--method pefll --set embedding={kind}-unlabeled",
        f"pefll.fit(federation, 'pefll', embedding='{kind}-unlabeled')",
    )
    raise PefllError(
        "this run needs labels to personalise, and the new client has none; give labels, or train a run that needs "
        f"none with {words}",
        code="PEFLL-T122",
    )


def _from_frame(frame: Any, y: Any, columns: Columns, spec: ModelSpec) -> tuple[Any, Any]:
    """Return one client's samples and labels in a table; PefllError if the table has several clients."""
    # Without names of features, a column with the usual name of clients may be a feature.
    candidates = names_of_owners(columns.client, columns.features, named=not columns.features)
    labels = label_names(columns.label, columns_of(frame))
    owned = find_owners(frame, candidates, (*columns.features, *labels), "the table")
    if owned is not None and (count := number_of_clients(owned[1], owned[0], "the table")) > 1:
        raise PefllError(
            f"the table holds the samples of {count} clients, by its column {owned[0]!r}; give the samples of one "
            f"client, or make a model for each with run.personalize_each(frame, client={owned[0]!r})",
            code="PEFLL-M037",
        )
    y = labels_in(frame, columns.label, "the table") if y is None else y
    if not columns.features:
        warn_of_positions(stacklevel=5)
    chosen = features_in(frame, columns, "the table")
    return inputs_of(frame, chosen, columns.plan, "the table", tokens=spec.tokens), y
