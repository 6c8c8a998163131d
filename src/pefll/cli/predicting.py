"""`pefll predict` with a folder of models: each client's rows with the client's own model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pefll.cli.console import err, out
from pefll.core import files
from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.core.wording import counted
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
) -> None:
    """Print or write the predictions of each client's model; PefllError at the end if some clients have none."""
    found = predictions_each(folder, data, client_column, label, architecture, task, err)
    if target is not None:
        files.write_csv(target, _rows(found, len(found)))
        clients = counted(len(set(found.client.tolist())), "client")
        say(out, f"wrote {target}: {counted(len(found), 'row')} of {clients}, each by the client's own model")
    else:
        for row in _rows(found, SHOWN):
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
        raise PefllError(without_predictions(found), code="PEFLL-M055")


def _rows(found: EachPredictions, most: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows of the CSV: the client, the row's number in the table from 0, and the prediction."""
    predicted = found.predicted.reshape(len(found), -1)
    cells = predicted.astype(int) if predicted.dtype == bool else predicted
    names = (
        found.class_names if len(found.class_names) == predicted.shape[1] else tuple(map(str, range(cells.shape[1])))
    )
    names = ("prediction",) if cells.shape[1] == 1 else names
    column = found.client_column if found.client_column not in ("sample", *names) else "client"
    for place in range(min(most, len(found))):
        row: dict[str, Any] = {column: found.client[place], "sample": int(found.sample[place])}
        if found.labels != "classes":
            yield row | dict(zip(names, cells[place].tolist(), strict=True))
            continue
        chosen = int(np.ravel(predicted[place])[0])
        row["class"] = found.class_names[chosen]
        yield row if found.probabilities is None else row | {"probability": f"{found.probabilities[place, chosen]:.6f}"}
