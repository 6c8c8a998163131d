"""`pefll predict` with a folder of models: each client's rows with the client's own model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pefll.cli.console import SomeClientsFailed, err, noting, out
from pefll.core import files
from pefll.core.progress import say
from pefll.core.wording import counted
from pefll.data.samples import Array
from pefll.runs.prediction_columns import client_column, probability_columns
from pefll.runs.record import figure_text
from pefll.training.predicting import EachPredictions, predictions_each, without_predictions

SHOWN = 20  # rows that are printed without --out


def predict_folder(
    folder: Path,
    data: Path,
    target: Path | None,
    client_column: str | None,
    label: str | None,
    architecture: str | None,
    task: str | None,
    each_class: bool | None,
) -> None:
    """Print or write the predictions of each client's model; SomeClientsFailed at the end if some have none."""
    with noting():
        found = predictions_each(folder, data, client_column, label, architecture, task, err)
    if target is not None:
        files.write_csv(target, _rows(found, len(found), each_class))
        clients = counted(len(set(found.client.tolist())), "client")
        say(out, f"wrote {target}: {counted(len(found), 'row')} of {clients}, each by the client's own model")
    else:
        for row in _rows(found, SHOWN, each_class=False):
            client, sample, *rest = row.values()
            say(out, f"sample {sample}, {client}: {', '.join(map(str, rest))}")
        if len(found) > SHOWN:
            say(out, f"... and {len(found) - SHOWN:,} more; --out predictions.csv writes all")
    if found.labels == "classes" and "accuracy" in found.metrics:
        is_are = "is" if found.labelled == 1 else "are"
        right = 100 * found.metrics["accuracy"]
        say(out, f"{right:.1f}% of {counted(found.labelled, 'sample')} with a label {is_are} right")
    elif found.metrics:
        words = ", ".join(f"{name} {figure_text(found.metrics, name)}" for name in found.metrics)
        say(out, f"{counted(found.labelled, 'sample')} with labels: {words}")
    if found.errors:
        raise SomeClientsFailed(without_predictions(found), code="PEFLL-M055")


def class_cells(
    predicted: Array, chances: Array | None, names: Sequence[str], each_class: bool | None
) -> Iterator[dict[str, Any]]:
    """Yield the cells of each row's prediction: the class, and probabilities if there are any.

    Args:
        predicted: [N] classes.
        chances: [N, classes], or None.
        names: the name of each class; empty if classes are whole numbers.
        each_class: see `probability_columns`.
    """
    columns = probability_columns(chances, predicted, names, each_class)
    for place, chosen in enumerate(predicted.tolist()):
        cells = {name: f"{values[place]:.6f}" for name, values in columns.items()}
        yield {"predicted": names[chosen] if names else chosen} | cells


def _rows(found: EachPredictions, most: int, each_class: bool | None) -> Iterator[dict[str, Any]]:
    """Yield the first rows of the CSV: the client, the row's number in the table from 0, and the prediction."""
    if found.labels == "classes":
        chances = None if found.probabilities is None else found.probabilities[:most]
        rows = class_cells(found.predicted[:most].reshape(-1), chances, found.class_names, each_class)
    else:
        rows = _other_cells(found, most)
    for place, row in enumerate(rows):
        column = client_column(found.client_column, ("sample", *row))
        yield {column: found.client[place], "sample": int(found.sample[place])} | row


def _other_cells(found: EachPredictions, most: int) -> Iterator[dict[str, Any]]:
    """Yield the cells of the first rows' predictions, if these are numbers or sets."""
    predicted = found.predicted.reshape(len(found), -1)
    cells = predicted.astype(int) if predicted.dtype == bool else predicted
    names = (
        found.class_names if len(found.class_names) == predicted.shape[1] else tuple(map(str, range(cells.shape[1])))
    )
    names = ("predicted",) if cells.shape[1] == 1 else names
    for row in cells[:most]:
        yield dict(zip(names, row.tolist(), strict=True))
