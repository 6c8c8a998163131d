"""The paired test of two rows of runs, from the figures of single clients in their summaries."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pefll.report.groups import SeedGroup
from pefll.report.runs import StoredRun
from pefll.report.significance import Counts, Difference, Floats, Pair, root_mean_test, sign_flip_test
from pefll.runs.client_names import makes_clients, names_of_group

# The counts of right samples in a summary that a measure is a ratio of.
COUNTS = {"per_sample": "correct", "masked": "masked"}
_EQUAL = 1e-4  # summaries have six digits of each client's figure


class ClientSums(NamedTuple):
    """What a measure of a run is made from: sums of each client, by which it is a mean or the root of a mean."""

    samples: Counts  # [n], what each client counts
    of_mean: Floats | None  # [n]; None if the measure is no mean
    of_root: Floats | None  # [n]; None if the measure is not the root of a mean


def paired_test(mine: SeedGroup, best: SeedGroup, group: str, measure: str, share: bool) -> Difference | None:
    """Return by how much a row is better than the best one, with a test; None if they cannot be paired.

    Args:
        mine: the row.
        best: the best row of the same data.
        group: the clients: seen or unseen.
        measure: the metric. It has a test if clients' figures add up to it, as a mean or as the root of a mean.
        share: whether it is in per cent.
    """
    both, runs = [], []
    others = {run.value("seed"): run for run in best.runs}
    for run in mine.runs:
        other = others.get(run.value("seed"))
        if other is None or run.config.get("data_sha256") != other.config.get("data_sha256"):
            continue
        ours, theirs = sums_of(run, group, measure), sums_of(other, group, measure)
        if ours is not None and theirs is not None and np.array_equal(ours.samples, theirs.samples):
            # An error is better when smaller.
            both.append((theirs, ours) if run.has_error(measure) else (ours, theirs))
            runs.append(run)
    clients = [_clients(run, group, len(one.samples)) for run, (one, _) in zip(runs, both, strict=True)]
    if None in clients and len(set(map(federation_of, runs))) > 1:
        return None  # nobody knows which of their clients are the same
    for kind, test in (("of_mean", sign_flip_test), ("of_root", root_mean_test)):
        pairs = [Pair(one.samples, getattr(one, kind), getattr(two, kind)) for one, two in both]
        if pairs and not any(part is None for pair in pairs for part in pair):
            return test(_in_places(pairs, clients), 100.0 if share else 1.0)
    return None


def federation_of(run: StoredRun) -> str:
    """Return what runs on the same federation have in common."""
    return str(run.config.get("data_sha256") or run.value("seed"))


def _clients(run: StoredRun, group: str, count: int) -> list[Hashable] | None:
    """Return what each of `count` clients of a group has in all runs with this client: its name in the data.

    Clients without names are those of their federation alone. None if the data names clients, but the run does not.
    """
    names = names_of_group(run.summary or {}, group)
    if names is not None and len(names) == len(set(names)) == count:
        return list(names)
    made = makes_clients(run.value("partition"))
    return [(federation_of(run), number) for number in range(count)] if made else None


def _in_places(pairs: Sequence[Pair], clients: Sequence[list[Hashable] | None]) -> list[Pair]:
    """Return pairs in which each client has the same place; without `clients`, it has it already."""
    if None in clients:
        return list(pairs)
    known = [each or [] for each in clients]
    places = {client: place for place, client in enumerate(dict.fromkeys(one for each in known for one in each))}
    found = []
    for pair, mine in zip(pairs, known, strict=True):
        here = np.array([places[client] for client in mine])
        samples = np.zeros(len(places), dtype=np.int64)
        ours, theirs = np.zeros((2, len(places)))
        samples[here], ours[here], theirs[here] = pair
        found.append(Pair(samples, ours, theirs))
    return found


def sums_of(run: StoredRun, group: str, measure: str) -> ClientSums | None:
    """Return each client's sums of a measure; None if there are none, or if the measure is neither kind of mean."""
    summary = run.summary or {}
    per_client = measure == "per_client"
    if isinstance(counts := summary.get("client_counts"), dict):
        found = _arrays(counts.get(group), COUNTS.get("per_sample" if per_client else measure, ""))
        if found is None:
            return None
        samples, right = found
        if per_client:
            return ClientSums(np.sign(samples), right / np.maximum(samples, 1), None)
        return ClientSums(samples, right, None)
    metrics = summary.get("client_metrics")
    found = _arrays(metrics.get(group), run.metric if per_client else measure) if isinstance(metrics, dict) else None
    if found is None:
        return None
    samples, values = found
    known = ~np.isnan(values)
    values = np.where(known, values, 0.0)
    if per_client and known.any():
        return ClientSums(known.astype(np.int64), values, None)
    figure = run.accuracy("best", group, measure)
    return None if figure is None or not known[samples > 0].all() else _adding_up_to(figure, samples, values)


def _adding_up_to(figure: float, samples: Counts, values: Floats) -> ClientSums | None:
    """Return the sums by which a figure is the mean of clients' values, or the root of the mean of their squares."""
    with np.errstate(over="ignore", invalid="ignore"):
        of_mean, of_root = samples * values, samples * values**2
        mean, root = (float(sums.sum() / samples.sum()) for sums in (of_mean, of_root))
    near = _EQUAL * float(np.abs(values).max())
    is_mean, is_root = abs(mean - figure) <= near, abs(math.sqrt(root) - figure) <= near
    found = ClientSums(samples, of_mean if is_mean else None, of_root if is_root else None)
    return found if is_mean or is_root else None


def _arrays(figures: Any, name: str) -> tuple[Counts, Floats] | None:
    """Return each client's number of samples and figure of a name, [n] each, NaN for null; None if there are none."""
    if not isinstance(figures, dict) or not {"samples", name} <= figures.keys():
        return None
    try:
        samples = np.array(figures["samples"], dtype=np.int64)
        values = np.array(figures[name], dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    fits = samples.ndim == 1 and samples.shape == values.shape and samples.min(initial=0) >= 0 and samples.any()
    # A stranger may have written the summary: sums must not overflow.
    return (samples, values) if fits and samples.sum(dtype=float) < 1 << 53 and not np.isinf(values).any() else None
