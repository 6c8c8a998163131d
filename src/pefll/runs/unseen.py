"""The test figures of single unseen clients, read from the summary of a run or from a committed result file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.errors import PefllError
from pefll.core.files import read_json
from pefll.core.wording import all_harmless, argument, counted
from pefll.runs.record import ERRORS, MOST_SUMMARY, SHARES, metric_word


class UnseenFigures(NamedTuple):
    """What a run measured on the test samples of its unseen clients, one entry per client with test samples.

    Attributes:
        metric: the metric in words, such as "accuracy".
        values: the metric of each client, between 0 and 1.
        samples: number of test samples of each client.
        correct: how many of them are classified correctly; None for another metric than accuracy.
        left_out: number of unseen clients that have no test samples, or for which the metric is not defined.
    """

    metric: str
    values: list[float]
    samples: list[int]
    correct: list[int] | None
    left_out: int


class TooFewUnseen(PefllError):
    """A run has too few unseen clients for a bound from them.

    Attributes:
        having: how many it has, such as `"no unseen client"`.
    """

    having = "no unseen client"


def unseen_figures(summary: Mapping[str, Any], where: object) -> UnseenFigures:
    """Return the figures of the unseen clients; PefllError if the summary has none.

    Args:
        summary: a run's summary, or the content of a result file.
        where: the run or the file, for errors.

    Raises:
        TooFewUnseen: if fewer than two unseen clients have a figure.
    """
    if summary.get("split", "test") != "test":
        raise PefllError(
            f"{where} is a trial of a search and was scored on {summary['split']} samples, which chose its settings; "
            "certify a run of `pefll train`",
            code="PEFLL-G120",
        )
    if summary.get("num_unseen") == 0:
        raise _too_few(where, "no unseen client")
    counts, metrics = summary.get("client_counts"), summary.get("client_metrics")
    if not isinstance(counts, Mapping) and not isinstance(metrics, Mapping):
        raise PefllError(
            f"{where} has no test counts of single clients: it has more than 10,000 clients, or an earlier version "
            "wrote it; train it again, or certify it in Python with its data: run.certify(federation=...)",
            code="PEFLL-G121",
        )
    try:
        found = _of_counts(counts) if isinstance(counts, Mapping) else _of_metrics(metrics, summary, where)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PefllError(f"{where} is damaged: its test counts make no sense ({error!r})", code="PEFLL-G122") from error
    if len(found.values) < 2:
        total = len(found.values) + found.left_out
        having = counted(total, "unseen client") if total else "no unseen client"
        but = f", {found.left_out:,} of them without a test figure" if found.left_out else ""
        raise _too_few(where, having + but)
    return found


def _too_few(where: object, having: str) -> TooFewUnseen:
    error = TooFewUnseen(
        f"{where} has {having}, but a certificate for new clients needs at least 2 with test samples; train with "
        f"unseen clients, such as {argument('unseen', 0.1)}",
        code="PEFLL-G123",
    )
    error.having = having
    return error


def _of_counts(counts: Mapping[str, Any]) -> UnseenFigures:
    group = counts["unseen"]
    pairs = list(zip(group["samples"], group["correct"], strict=True))
    if not all(type(m) is int and type(k) is int and 0 <= k <= m for m, k in pairs):
        raise ValueError("not whole numbers with correct <= samples")
    used = [(m, k) for m, k in pairs if m]
    values, samples, correct = [k / m for m, k in used], [m for m, _ in used], [k for _, k in used]
    return UnseenFigures("accuracy", values, samples, correct, len(pairs) - len(used))


def _of_metrics(metrics: Mapping[str, Any], summary: Mapping[str, Any], where: object) -> UnseenFigures:
    group = metrics["unseen"]
    name = next((key for key in group if key != "samples"), "")
    if name and name not in (*SHARES, *_names(summary, "shares")):
        raise PefllError(
            f"{where} is scored by {name}, which has no largest value, so no certificate holds for its mean; score a "
            "metric between 0 and 1 first, such as the share of samples within a tolerance: in a task of your own, put "
            "a pefll.Metric with bounds=(0, 1) first in `measured`",
            code="PEFLL-G124",
        )
    if name in (*ERRORS, *_names(summary, "errors")):
        raise PefllError(
            f"{where} is scored by {name}, which is better when smaller, but a certificate bounds a mean from below; "
            "score the share of samples that are right first",
            code="PEFLL-G129",
        )
    samples, found = group["samples"], group[name] if name else []
    if name and len(samples) != len(found):
        raise ValueError("lists of different lengths")
    known = [(m, value) for m, value in zip(samples, found, strict=False) if value is not None]
    if not all(type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1 for _, value in known):
        raise ValueError(f"{name} is not between 0 and 1")
    return UnseenFigures(
        metric_word(name), [float(value) for _, value in known], [m for m, _ in known], None, len(samples) - len(known)
    )


def _names(summary: Mapping[str, Any], key: str) -> list[Any]:
    """Return the names of metrics that a summary has under a key; summaries of earlier versions have none."""
    names = summary.get(key)
    return names if isinstance(names, list) else []


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of a committed result file; PefllError if it is something else."""
    content = all_harmless(read_json(path, MOST_SUMMARY))
    if not isinstance(content, dict) or "method" not in content or "num_unseen" not in content:
        raise PefllError(
            f"{path} is not the result of a run; name a run folder, a file that `pefll results add` wrote, or a "
            "personal model",
            code="PEFLL-G125",
        )
    return content
