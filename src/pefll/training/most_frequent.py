"""Whether a run is better than answering each client's most frequent class."""

from __future__ import annotations

from typing import Any

import numpy as np

from pefll.core.wording import argument
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN, VALIDATION, Array

_LEAST = 0.04  # a run that makes fewer than so many of the errors of a guess right is hardly better


def most_frequent_class(federation: Federation) -> float | None:
    """Return the share of seen clients' validation samples that have the most frequent class of training.

    That is the client's most frequent class or that of all clients, whichever is right more often. None if there are
    no classes, or if no validation sample is here.
    """
    if federation.labels != "classes" or not len(federation.rows):
        return None
    (client, label), (owner, truth) = (_seen_labels(federation, split) for split in (TRAIN, VALIDATION))
    if not len(truth):
        return None
    # Counts of the pairs that exist: a table of all clients and classes may be too large.
    pairs, count = np.unique(client * federation.classes + label, return_counts=True)
    order = np.lexsort((-count, pairs // federation.classes))
    first = np.unique(pairs[order] // federation.classes, return_index=True)[1]
    of_client = pairs[order][first] % federation.classes  # [seen clients], since each has a training sample
    right = (truth == of_client[owner]).mean(), (truth == np.bincount(label).argmax()).mean()
    return float(max(right))


def _seen_labels(federation: Federation, split: int) -> tuple[Array, Array]:
    """Return the client and the label of each sample of the seen clients in a split, int64 [R] each."""
    count = federation.count[split, : federation.num_seen].cpu().numpy()
    labels = federation.y.cpu().numpy()[federation.rows_of_clients(split, 0, federation.num_seen)]
    return np.repeat(np.arange(federation.num_seen), count), labels.astype(np.int64)


def hardly_better(federation: Federation, history: list[dict[str, Any]]) -> str:
    """Return the sentence for a run that is not or hardly better than the most frequent class at its best, or ""."""
    scores = [row["seen"]["per_sample"] for row in history if (row.get("seen") or {}).get("per_sample") is not None]
    guess = most_frequent_class(federation) if scores else None
    # A run without errors cannot be better: that of clients with one class each, for example.
    if guess is None or max(scores) >= 1 or max(scores) > guess + _LEAST * (1 - guess):
        return ""
    how = "no" if max(scores) <= guess else "hardly"
    return (
        f"the run is {how} better than a guess: it is right on {100 * max(scores):.1f}% of seen clients' validation "
        f"samples, and always answering the most frequent class on {100 * guess:.1f}%; try more rounds, more "
        f"clients per round ({argument('clients_per_round')}), or larger learning rates (`pefll methods` lists them)"
    )
