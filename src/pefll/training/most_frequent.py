"""Whether a run is better than answering each client's most frequent class."""

from __future__ import annotations

from typing import Any

from pefll.core.wording import argument
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN, VALIDATION

_LEAST = 0.04  # a run that makes fewer than so many of the errors of a guess right is hardly better


def most_frequent_class(federation: Federation) -> float | None:
    """Return the share of seen clients' validation samples that have the most frequent class of training.

    That is the client's most frequent class or that of all clients, whichever is right more often. None if there are
    no classes, or if no validation sample is here.
    """
    seen = slice(0, federation.num_seen)
    if federation.labels != "classes" or not len(federation.rows) or not int(federation.count[VALIDATION, seen].sum()):
        return None
    train, validation = (federation.histograms(split)[seen] for split in (TRAIN, VALIDATION))
    of_client = validation[range(len(train)), train.argmax(axis=1)].sum()
    of_all = validation[:, train.sum(axis=0).argmax()].sum()
    return float(max(of_client, of_all) / validation.sum())


def hardly_better(federation: Federation, history: list[dict[str, Any]]) -> str:
    """Return the sentence for a run whose best evaluation is hardly better than the most frequent class, or ""."""
    scores = [row["seen"]["per_sample"] for row in history if (row.get("seen") or {}).get("per_sample") is not None]
    guess = most_frequent_class(federation) if scores else None
    if guess is None or max(scores) > guess + _LEAST * (1 - guess):
        return ""
    return (
        f"the run is hardly better than a guess: it is right on {100 * max(scores):.1f}% of seen clients' validation "
        f"samples, and always answering the most frequent class on {100 * guess:.1f}%; try more rounds, more "
        f"clients per round ({argument('clients_per_round')}), or larger learning rates (`pefll methods` lists them)"
    )
