"""Predictions for the rows of many clients, each by the client's own model in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.progress import monitor
from pefll.core.warning import warn
from pefll.core.wording import counted, reasons
from pefll.data import TABLES, read_rows
from pefll.data.arrays import labels_of, owners_of
from pefll.data.frames import index_of, is_frame
from pefll.data.missing_labels import has_label, without_gaps
from pefll.data.owners import CLIENT, Columns, Name, Rows, first_fault, rows_by_client, rows_of_frame
from pefll.data.samples import Array
from pefll.data.table_files import read_frame
from pefll.data.table_plan import encoded, plan_of
from pefll.data.user_files import LABEL, kind_of_file
from pefll.models.spec import ModelSpec
from pefll.runs.model_folder import ModelFile, files_of
from pefll.runs.modelfile import read_header
from pefll.runs.personal import PersonalModel, metrics_of, predicted_with_probabilities
from pefll.runs.prediction_columns import client_column, data_frame, named, probability_columns
from pefll.tasks import Task


@dataclass(frozen=True, eq=False)
class EachPredictions:
    """What the clients' models say about the rows of a table, one entry per row, in the order of the table.

    Attributes:
        client: [N], the client's name in the table.
        sample: int64 [N], the number of the row in the table, from 0. Rows of clients without predictions are left out.
        predicted: [N, ...], the predictions, as `PersonalModel.predict` returns them; classes are numbers from 0.
        probabilities: [N, k], the probability of each class, or of each member of a set; None if the task gives none.
        labels: what the predictions are: classes, numbers or sets.
        class_names: the name of each class, or of each output; empty if the data has no names.
        client_column: name of the table's column of clients.
        metrics: the task's metrics over all rows with a label, the most important one first; empty without labels.
        labelled: number of rows with a label.
        errors: why a client has no predictions, by its name.
        index: the index of the given pandas data frame, or None.
    """

    client: Array
    sample: Array
    predicted: Array
    probabilities: Array | None
    labels: str
    class_names: tuple[str, ...]
    client_column: str
    metrics: dict[str, float]
    labelled: int
    errors: dict[Name, PefllError]
    index: Any = None

    def __len__(self) -> int:
        return len(self.sample)

    def __repr__(self) -> str:
        clients = len(set(self.client.tolist()))
        return f"<EachPredictions of {counted(len(self), 'row')} of {counted(clients, 'client')}>"

    def frame(self) -> Any:
        """Return a pandas data frame with the client's column, the row `sample`, `predicted` and `probability`.

        Its index is that of the given data frame, or else the row in the table from 0. Classes are as the labels of
        training: texts, True and False, or whole numbers. The probability is that of the predicted class; for sets,
        those of all members. Up to 20 classes also have a column each, such as `probability_yes`. If the client's
        column has the name of another one, it is called `client`.
        """
        classes = self.class_names if self.labels == "classes" else ()
        columns: dict[str, Any] = {"sample": self.sample, "predicted": named(self.predicted, classes)}
        columns |= probability_columns(self.probabilities, self.predicted, classes)
        of_clients = {client_column(self.client_column, columns): self.client}
        return data_frame(of_clients | columns, self.sample if self.index is None else self.index[self.sample])


def predict_each(
    folder: str | Path,
    data: Any,
    *,
    client: str | None = None,
    label: str | None = None,
    architecture: str | None = None,
    task: str | Task | None = None,
    console: Console | None = None,
) -> EachPredictions:
    """Return predictions for the rows of many clients, each by the client's own model.

    A client without a model, or with faulty rows, gets no predictions; a warning says so, and `errors` says why.

    Args:
        folder: what `pefll personalize --each` made: a model for each client, and models.json.
        data: a table with a column of clients, or the path of a file; see `read_each`.
        client: name of the column of clients; None for that of the training data.
        label: name of the column of labels, which may be absent; None for that of the training data.
        architecture: the model's name `package.module:function`, if it is your own code.
        task: your own task, if the run was trained with one: a value, or its name `package.module:Class`.
        console: shows progress; None for silence.
    """
    found = predictions_each(folder, data, client, label, architecture, task, console)
    if found.errors:
        warn(without_predictions(found))
    return found


def without_predictions(found: EachPredictions) -> str:
    """Return the sentence that says which clients have no predictions."""
    total = counted(len(found.errors) + len(set(found.client.tolist())), "client")
    return f"{len(found.errors):,} of {total} got no predictions{reasons(found.errors)}"


def predictions_each(
    folder: str | Path,
    data: Any,
    client: str | None,
    label: str | None,
    architecture: str | None,
    task: str | Task | None,
    console: Console | None,
) -> EachPredictions:
    """Return what `predict_each` returns, without a warning."""
    folder = arguments.path(folder)
    files = files_of(folder)
    source = _Source(data, _first_spec(folder, files), client, label)
    owner, names = owners_of(source.clients, source.name)
    outputs: list[Array] = []
    rows: list[Array] = []
    errors: dict[Name, PefllError] = {}
    model: PersonalModel | None = None
    with monitor(console, "predicting", len(names)) as watch:
        for done, (number, mine) in enumerate(rows_by_client(owner, len(names)), start=1):
            try:
                file = _file_of(names[number], files, folder)
                one = PersonalModel.load(file.path, None, architecture, task)
                file.check_is(one.spec)
                model = model or one
                _check_same_labels(one.spec, model.spec)
                outputs.append(one.outputs(source.samples(one.spec, mine)))
                rows.append(mine)
            except PefllError as error:
                if error.code == MISSING_COLUMN:  # every client's rows lack it
                    raise
                errors[names[number]] = error
            watch.at(done, f"{len(errors)} without predictions" if errors else "")
    if model is None or not rows:
        raise PefllError(
            f"none of {counted(len(names), 'client')} of {source.name} got predictions{reasons(errors)}",
            code="PEFLL-M049",
        )
    order = np.argsort(np.concatenate(rows))
    sample, output = np.concatenate(rows)[order], torch.from_numpy(np.concatenate(outputs)[order])
    meaning = model.known_task()
    predicted, chances = predicted_with_probabilities(meaning, output, model.spec.classes)
    metrics, labelled = _metrics(source, sample, output, meaning, model.spec)
    return EachPredictions(
        client=np.asarray(names, dtype=object)[owner[sample]],
        sample=sample,
        predicted=predicted,
        probabilities=chances,
        labels=meaning.labels,
        class_names=model.spec.class_names,
        client_column=source.columns.client,
        metrics=metrics,
        labelled=labelled,
        errors=errors,
        index=index_of(data) if is_frame(data) else None,
    )


MISSING_COLUMN = "PEFLL-M030"
_MOST_PLANS = 2  # plans of tables whose encoded rows are kept


class _Source:
    """The rows of all clients, encoded once for all models with the same plan."""

    def __init__(self, data: Any, spec: ModelSpec, client: str | None, label: str | None) -> None:
        path = None if is_frame(data) else arguments.path(data, "data").expanduser()
        self._table = data
        if path is not None:
            self._table = read_frame(path) if kind_of_file(path) == "table" else None
        self._path = path
        self.name = "the table" if path is None else str(path)
        usual = spec.label_column or LABEL if path is None or path.suffix.lower() in TABLES else LABEL
        self.columns = Columns((), label or usual, client or spec.client_column or CLIENT)
        self._read: dict[str, tuple[Rows, dict[int, PefllError]]] = {}
        rows, _ = self._rows(spec)
        self.clients, self.y = rows.client, rows.y

    def samples(self, spec: ModelSpec, rows: Array) -> Any:
        """Return some rows as a model takes them; PefllError if one of them cannot be read."""
        found, faults = self._rows(spec)
        if fault := first_fault(faults, rows):
            raise fault
        return encoded(found.x[rows]) if spec.table and self._table is not None else found.x[rows]

    def _rows(self, spec: ModelSpec) -> tuple[Rows, Mapping[int, PefllError]]:
        key = json.dumps([spec.table, spec.feature_names, spec.tokens])
        if key not in self._read:
            plan, faults = plan_of(spec.table, spec.input_shape), dict[int, PefllError]()
            features = plan.names if plan else spec.feature_names
            columns = self.columns._replace(features=features, plan=plan, class_names=spec.named_classes)
            if self._table is not None:
                bad: Callable[[int, PefllError], object] = faults.setdefault
                rows = rows_of_frame(self._table, columns, self.name, tokens=spec.tokens, bad=bad)
            else:
                assert self._path is not None
                rows = read_rows(self._path, columns, tokens=spec.tokens)
            while len(self._read) >= _MOST_PLANS:  # models of one run have one plan; others must not fill the memory
                self._read.pop(next(iter(self._read)))
            self._read[key] = rows, faults
        return self._read[key]


def _first_spec(folder: Path, files: Mapping[str, ModelFile]) -> ModelSpec:
    """Return the spec of the first readable model, whose run names the columns."""
    error = PefllError(f"{folder} has no models; make them with `pefll personalize --each`", code="PEFLL-M045")
    for file in files.values():
        try:
            return read_header(file.path).spec
        except PefllError as problem:
            error = problem
    raise error


def _file_of(client: Name, files: Mapping[str, ModelFile], folder: Path) -> ModelFile:
    if str(client) not in files:
        raise PefllError(
            f"the folder {folder} has no model of this client; make one with `pefll personalize --each`",
            code="PEFLL-M046",
        )
    return files[str(client)]


def _check_same_labels(spec: ModelSpec, first: ModelSpec) -> None:
    """Raise PefllError for a model whose predictions mean something else than those of the first one."""
    if (spec.task, spec.class_names, spec.classes) != (first.task, first.class_names, first.classes):
        raise PefllError(
            "its model was trained on other labels than the first model of the folder; keep the models of each run in "
            "a folder of their own",
            code="PEFLL-M047",
        )


def _metrics(
    source: _Source, sample: Array, output: torch.Tensor, task: Task, spec: ModelSpec
) -> tuple[dict[str, float], int]:
    """Return the metrics over the rows with a label, and their number; {} and 0 without labels."""
    if source.y is None:
        return {}, 0
    there = has_label(np.asarray(source.y))[sample]
    if not there.any():
        return {}, 0
    y = labels_of(without_gaps(np.asarray(source.y)[sample][there]), spec.class_names, source.name, task.labels)
    if spec.classes and not 0 <= int(y.min()) <= int(y.max()) < spec.classes:
        raise PefllError(
            f"{source.name}: labels are {y.min()} to {y.max()}; the models know 0..{spec.classes - 1}",
            code="PEFLL-M048",
        )
    return metrics_of(task, output[torch.from_numpy(there)], torch.from_numpy(y), spec.classes), int(there.sum())
