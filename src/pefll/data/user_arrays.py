"""Makes federations from a user's arrays and tables in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.warning import warn
from pefll.data.arrays import samples_from_arrays
from pefll.data.column_use import use_of
from pefll.data.federation import Federation
from pefll.data.frames import index_of
from pefll.data.partition import natural
from pefll.data.samples import Samples
from pefll.data.selecting import selected
from pefll.data.table_samples import from_frame


def federation_from_arrays(
    x: Any,
    y: Any,
    client: Any,
    *,
    split: Any = None,
    min_samples: int = 1,
    time: Any = None,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "arrays",
    tokens: bool = False,
    labels: str = "auto",
) -> Federation:
    """Return a federation of the clients that a user's arrays name.

    Args:
        x: [N, ...] numbers: features, tokens, or images channels-first or channels-last, see `arrays.inputs`.
        y: labels: [N] whole numbers from 0 or texts; [N] or [N, k] floats; [N, k] of 0 and 1, see `Samples`.
        client: [N] the owner of each sample: any whole numbers or texts.
        split: [N] train, validation, test (or 0, 1, 2); None to split each client's samples at random.
        min_samples: clients with fewer samples are left out.
        time: [N] dates or numbers: each client's last samples become its test samples, and those before them its
            validation samples.
        unseen: fraction of clients that never take part in training.
        unseen_clients: the clients that never take part in training, by name; they replace `unseen`.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples, if `split` is None.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        name: name of the data.
        tokens: whether x holds whole numbers that a model embeds, for example a text as [N, length].
        labels: what labels are, see `samples_from_arrays`; with auto, their type and shape tell.
    """
    if client is None:
        name = arguments.text(name, "name")
        raise PefllError(
            f"{name}: there is no client column; name the clients, or partition the samples by class", code="PEFLL-D182"
        )
    samples = samples_from_arrays(x, y, client, split, classes, name, tokens=tokens, labels=labels, time=time)
    return federation_of_clients(
        samples,
        min_samples=min_samples,
        seed=seed,
        unseen=unseen,
        unseen_clients=unseen_clients,
        validation=validation,
        test=test,
    )


def federation_from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str,
    *,
    split: str | None = None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    treat: Mapping[str, str] | None = None,
    missing: str = "impute",
    encode: str = "auto",
    min_samples: int = 1,
    time: str | None = None,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "frame",
    labels: str = "auto",
) -> Federation:
    """Return a federation of the clients in a table.

    Numbers are standardised, categories get an input per value, and missing values are filled. All this is learned
    from training rows of seen clients, and is stored with each run and model: `federation.table`.

    Args:
        frame: a pandas or polars data frame, a pyarrow table, or a dictionary of columns, with a row per sample.
        label: name of the column of labels; or several names, as a list or with commas between them.
        client: name of the column of clients.
        split: name of the column with train, validation, test; None to split each client's rows at random.
        features: names of the columns that are features, in order; by default all others.
        drop: names of columns that are not used.
        treat: rules for columns, by their names: "number", "category", "date" (days, a trend), "calendar" (time of the
            year, the week and the day), "text" (counts of words), or "decimal-comma" (3,5 is 3.5). Dates, long texts
            and numbers with commas need one.
        missing: "impute" fills missing values and marks them, "drop" leaves such rows out, "refuse" is an error. A row
            without a label is an error, too, but left out with "drop", and with "drop-unlabelled", which otherwise is
            "impute".
        encode: "auto", or "none" to use numbers as they are.
        min_samples: clients with fewer rows are left out.
        time: name of a column of dates or numbers: each client's last rows become its test samples, and those before
            them its validation samples.
        unseen: fraction of clients that never take part in training.
        unseen_clients: the clients that never take part in training, by name; they replace `unseen`.
        validation: fraction of each client's training rows that become validation samples.
        test: fraction of each client's rows that become test samples, without `split`.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        name: name of the data.
        labels: what labels are, see `samples_from_arrays`; with auto, their type and shape tell.
    """
    dropped = [arguments.text(each, "drop") for each in arguments.listed(drop, "drop", "['note']")]
    use = use_of(drop=dropped, treat=treat, encode=encode, time="" if time is None else time, missing=missing)
    samples = from_frame(frame, label, client, split, features, classes=classes, name=name, use=use, labels=labels)
    federation = federation_of_clients(
        samples,
        missing,
        min_samples,
        seed=seed,
        unseen=unseen,
        unseen_clients=unseen_clients,
        validation=validation,
        test=test,
    )
    return replace(federation, index=index_of(frame))


def federation_of_clients(
    samples: Samples, missing: str = "impute", min_samples: int = 1, *, seed: int, **parts: Any
) -> Federation:
    """Return a federation of the samples' own clients, and warn of what was left out.

    Args:
        samples: the samples.
        missing: see `selecting.selected`.
        min_samples: see `selecting.selected`.
        seed: seed of the random splits and of the order of clients.
        parts: unseen clients, validation and test samples, see `partition.natural`.
    """
    samples, notes = selected(samples, missing, min_samples)
    for note in notes:
        warn(note)
    return natural(samples, seed, **parts)
