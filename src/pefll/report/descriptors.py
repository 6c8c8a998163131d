"""What client descriptors have learned: do clients with similar data have similar descriptors?"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError
from pefll.runs.record import RunFolder

Array = npt.NDArray[Any]

# Distances are n² numbers: beyond these, evenly spaced clients stand for the rest.
MOST_CLIENTS = 10_000
MOST_PROBES = 1_000


@dataclass(frozen=True, eq=False)
class Descriptors:
    """What `descriptors.npz` of a run holds.

    Attributes:
        descriptors: float64 [n, l].
        histograms: int64 [n, classes], the samples of each class that each client has.
        seen: bool [n].
    """

    descriptors: Array
    histograms: Array
    seen: Array


def read_descriptors(folder: RunFolder) -> Descriptors:
    """Read a run's descriptors, or raise PefllError with one sentence where there are none or they are damaged."""
    path = folder.descriptors_file
    if not path.is_file():
        raise PefllError(
            f"{folder.path} has no descriptors.npz: its method has no descriptors, or it is not finished",
            code="PEFLL-O001",
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            v = np.asarray(arrays["descriptors"], dtype=np.float64)
            histograms, seen = np.asarray(arrays["histograms"]), np.asarray(arrays["seen"]).astype(bool)
            run = str(arrays["run"]) if "run" in arrays else folder.run_id()
    except KeyError as error:
        raise PefllError(f"{path} is damaged: {error.args[0]}", code="PEFLL-O002") from error
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise PefllError(f"{path} is damaged: {error}", code="PEFLL-O003") from error
    if run != folder.run_id():
        raise PefllError(f"{path} is of another run than config.toml; put back its own", code="PEFLL-O011")
    if v.ndim != 2 or histograms.ndim != 2 or seen.ndim != 1 or not len(v) == len(histograms) == len(seen) > 0:
        shapes = f"{v.shape}, {histograms.shape} and {seen.shape}"
        raise PefllError(f"{path} is damaged: descriptors, histograms and seen have shapes {shapes}", code="PEFLL-O004")
    if not np.isfinite(v).all():
        raise PefllError(f"{path}: descriptors have NaN or infinite values, so the run has diverged", code="PEFLL-O005")
    return Descriptors(v, histograms, seen)


def principal_plane(points: Array) -> tuple[Array, Array]:
    """Project points onto their two directions of greatest variance.

    Args:
        points: [n, l].

    Returns:
        The projection, [n, 2], and the share of the variance that each direction has, [2]. A direction that does not
        exist (l = 1, or fewer than three points) is zero.
    """
    centred = points - points.mean(axis=0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    # The SVD leaves signs open; fixed, so that the same run always gives the same picture.
    signs = np.where(vt[np.arange(len(vt)), np.abs(vt).argmax(axis=1)] < 0, -1.0, 1.0)
    plane, shares = np.zeros((len(points), 2)), np.zeros(2)
    rank = min(2, len(s))
    plane[:, :rank] = (u * s * signs)[:, :rank]
    total = float((s**2).sum())
    if total > 0:
        shares[:rank] = s[:rank] ** 2 / total
    return plane, shares


def spearman(a: Array, b: Array) -> float:
    """Return Spearman's rank correlation of two vectors [n]; equal values share the mean of their ranks.

    NaN where a vector is constant or shorter than two: it has no order to agree with.
    """
    if len(a) < 2:
        return float("nan")
    ranks = [_ranks(np.asarray(vector)) for vector in (a, b)]
    x, y = (rank - rank.mean() for rank in ranks)
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_ranks: Array = (last - (counts - 1) / 2)[inverse]
    return mean_ranks


def distances(found: Descriptors) -> tuple[Array, Array]:
    """Return how far probing clients are from all others.

    The probes are the unseen clients, or all clients where none is unseen. A client is not compared with itself. Above
    MOST_PROBES probes or MOST_CLIENTS clients, evenly spaced ones are taken.

    Returns:
        Distances of descriptors ‖v_i - v_j‖ and of label distributions ‖π_i - π_j‖, [probes, others] each.
    """
    n = len(found.seen)
    kept = _spaced(np.arange(n), MOST_CLIENTS)
    unseen = kept[~found.seen[kept]]
    if not found.seen.all() and len(unseen) == 0:
        # So few clients are unseen that the spacing missed them all.
        unseen = np.flatnonzero(~found.seen)
    probes = _spaced(unseen if len(unseen) else kept, MOST_PROBES)
    pi = found.histograms / np.maximum(1, found.histograms.sum(axis=1, keepdims=True))
    d_v, d_pi = [], []
    for probe in probes:
        others = kept[kept != probe][: len(kept) - 1]
        d_v.append(np.linalg.norm(found.descriptors[others] - found.descriptors[probe], axis=1))
        d_pi.append(np.linalg.norm(pi[others] - pi[probe], axis=1))
    # Rounded, because distances that are equal on paper differ in the last bit, and that would break ties.
    return np.array(d_v), np.array(d_pi).round(12)


def rank_correlation(found: Descriptors) -> float:
    """Return the paper's "Analysis of Client Descriptors": the mean over probing clients of Spearman's correlation.

    For each unseen client (each client, where none is unseen) the distances of its descriptor to the other clients'
    are correlated with the distances of its label distribution to theirs. NaN where no client gives a correlation.
    """
    return mean_correlation(*distances(found))


def mean_correlation(d_v: Array, d_pi: Array) -> float:
    """Return the mean over rows of Spearman's correlation of `d_v` and `d_pi`, [probes, others] each."""
    each = np.array([spearman(a, b) for a, b in zip(d_v, d_pi, strict=True)])
    each = each[~np.isnan(each)]
    return float(each.mean()) if len(each) else float("nan")


def _spaced(items: Array, most: int) -> Array:
    if len(items) <= most:
        return items
    return items[np.linspace(0, len(items) - 1, most).round().astype(np.int64)]
