"""The samples of one client, as commands read them for a personal model or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pefll import data as sources
from pefll.cli.console import err, noting
from pefll.core.progress import say
from pefll.data.table_plan import plan_of
from pefll.models.spec import ModelSpec
from pefll.runs.personal import check_client
from pefll.tasks.names import labels_for


def label_in_training(data: Path, trained: str | None) -> str:
    """Return the label column of the training data for a table; the default for other files."""
    return trained or sources.LABEL if data.suffix.lower() in sources.TABLES else sources.LABEL


def samples_of_client(data: Path, label: str, spec: ModelSpec, anyway: str = "", **more: Any) -> tuple[Any, Any]:
    """Return one client's samples and labels, in the form of a model's training data; `more` goes to `read_client`.

    If `anyway` says what a user does to use a model anyway, they must be of the model's own client; see `check_client`.
    """
    if anyway:
        more["of_client"] = lambda column, client: check_client(spec, column, client, str(data), anyway)
    if data.suffix.lower() in sources.TABLES and not spec.feature_names:
        say(err, f"note: the model does not know the names of its columns; those of {data} are taken by position")
    with noting():
        return sources.read_client(
            data,
            label=label,
            class_names=spec.class_names,
            tokens=spec.tokens,
            features=spec.feature_names,
            plan=plan_of(spec.table, spec.input_shape),
            labels=labels_in(spec),
            gaps=True,
            **({"client": spec.client_column} if spec.client_column else {}) | more,
        )


def labels_in(spec: ModelSpec) -> str:
    """Return what labels are for a model: classes, numbers or sets."""
    return labels_for(spec.task) if spec.task else "classes"
