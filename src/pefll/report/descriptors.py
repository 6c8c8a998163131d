"""Analysis of client descriptors: do clients with similar data have similar descriptors?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError
from pefll.core.files import open_limited
from pefll.core.wording import first_few
from pefll.data.npz import read_npz
from pefll.runs.record import MOST_DESCRIPTORS, RunFolder

Array = npt.NDArray[Any]

# n clients have n² distances. Above these limits, only evenly spaced clients are used.
MOST_CLIENTS = 10_000
MOST_PROBES = 1_000
_ARRAYS = ("descriptors", "histograms", "seen")
_OF_OTHER_LABELS = ("labels", "samples", "means", "label_name")


@dataclass(frozen=True, eq=False)
class Descriptors:
    """The content of a run's `descriptors.npz`."""

    descriptors: Array  # float64 [n, l]
    histograms: Array  # int64 [n, classes], samples per client and class; see `Federation.histograms` for other labels
    seen: Array  # bool [n]
    class_names: tuple[str, ...] = ()  # one per class; empty if the data has no names, or in files of earlier versions
    labels: str = "classes"  # what labels are: classes, numbers or sets
    samples: Array | None = None  # int64 [n], samples per client; None in files of earlier versions
    means: Array | None = None  # float64 [n], mean of a client's labels, if these are numbers: of their first column
    label_name: str = ""  # name of this column; empty without a name

    @property
    def distributions(self) -> Array:
        """The share of each client's samples of each class, member of sets, or group of numbers, float64 [n, k]."""
        total = self.histograms.sum(axis=1) if self.labels != "sets" or self.samples is None else self.samples
        shares: Array = self.histograms / np.maximum(1, total)[:, None]
        return shares


def read_descriptors(folder: RunFolder) -> Descriptors:
    """Return the descriptors of a run; PefllError if it has none or the file is damaged."""
    path = folder.descriptors_file
    if not path.is_file():
        raise PefllError(
            f"{folder.path} has no descriptors.npz: its method has no descriptors, or the run is not finished",
            code="PEFLL-O001",
        )
    try:
        with open_limited(path, MOST_DESCRIPTORS):
            arrays = read_npz(path, (), (*_ARRAYS, *_OF_OTHER_LABELS, "run", "class_names"))
        if missing := [name for name in _ARRAYS if name not in arrays]:
            raise PefllError(f"{path} is damaged: it has no {first_few(missing)}", code="PEFLL-O002")
        v = np.asarray(arrays["descriptors"], dtype=np.float64)
        histograms, seen = arrays["histograms"], arrays["seen"].astype(bool)
    except (OSError, ValueError, TypeError) as error:
        raise PefllError(f"{path} is damaged: {error}", code="PEFLL-O003") from error
    except PefllError as error:
        if not error.code.startswith("PEFLL-D"):
            raise
        raise PefllError(f"{path} is damaged: its arrays cannot be read", code="PEFLL-O003") from error
    if "run" in arrays and str(arrays["run"]) != folder.run_id():
        raise PefllError(
            f"{path} belongs to another run than config.toml; restore the file of this run", code="PEFLL-O011"
        )
    if v.ndim != 2 or histograms.ndim != 2 or seen.ndim != 1 or not len(v) == len(histograms) == len(seen) > 0:
        shapes = f"{v.shape}, {histograms.shape} and {seen.shape}"
        raise PefllError(f"{path} is damaged: descriptors, histograms and seen have shapes {shapes}", code="PEFLL-O004")
    if not np.isfinite(v).all():
        raise PefllError(f"{path}: descriptors have NaN or infinite values; the run has diverged", code="PEFLL-O005")
    names = arrays.get("class_names", np.array([], dtype=str))
    if names.dtype.kind != "U" or names.shape not in ((0,), (histograms.shape[1],)):
        raise PefllError(f"{path} is damaged: its class_names are not one text per class", code="PEFLL-O622")
    return Descriptors(v, histograms, seen, tuple(names.tolist()), **_of_other_labels(path, arrays, len(v)))


def _of_other_labels(path: Path, arrays: Mapping[str, Array], n: int) -> dict[str, Any]:
    """Return what a file says of labels that are no classes; PefllError if it makes no sense."""
    labels, name = (str(arrays.get(key, "")) for key in ("labels", "label_name"))
    samples, means = arrays.get("samples"), arrays.get("means")
    if labels in ("", "classes"):
        return {}
    fits = labels in ("numbers", "sets") and samples is not None and samples.shape == (n,)
    if labels == "numbers":
        fits = fits and means is not None and means.shape == (n,) and bool(np.isfinite(means).all())
    if not fits:
        raise PefllError(f"{path} is damaged: what it says of the labels makes no sense", code="PEFLL-O660")
    return {"labels": labels, "samples": samples, "means": means, "label_name": name}


def principal_plane(points: Array) -> tuple[Array, Array]:
    """Return points [n, l] along their two principal directions, [n, 2], and each direction's share of variance, [2].

    If a direction does not exist (l = 1, or fewer than three points), its values are zero.
    """
    centred = points - points.mean(axis=0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    # An SVD does not determine signs. We fix them, so that a run always gives the same picture.
    signs = np.where(vt[np.arange(len(vt)), np.abs(vt).argmax(axis=1)] < 0, -1.0, 1.0)
    plane, shares = np.zeros((len(points), 2)), np.zeros(2)
    rank = min(2, len(s))
    plane[:, :rank] = (u * s * signs)[:, :rank]
    total = float((s**2).sum())
    if total > 0:
        shares[:rank] = s[:rank] ** 2 / total
    return plane, shares


def spearman(a: Array, b: Array) -> float:
    """Return Spearman's rank correlation of two vectors [n]; NaN if one is constant or n < 2.

    Equal values share the mean of their ranks.
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
    """Return the distances between probes and all other clients, [probes, others], for descriptors and labels.

    They are ‖v_i - v_j‖ of descriptors and ‖π_i - π_j‖ of label distributions. The probes are the unseen clients, or
    all clients if none is unseen. If MOST_PROBES or MOST_CLIENTS is exceeded, evenly spaced clients are used.
    """
    n = len(found.seen)
    kept = _spaced(np.arange(n), MOST_CLIENTS)
    unseen = kept[~found.seen[kept]]
    if not found.seen.all() and len(unseen) == 0:
        # The spacing missed all unseen clients, because they are few.
        unseen = np.flatnonzero(~found.seen)
    probes = _spaced(unseen if len(unseen) else kept, MOST_PROBES)
    pi = found.distributions
    d_v, d_pi = [], []
    for probe in probes:
        others = kept[kept != probe][: len(kept) - 1]  # equally many for a probe that is not in `kept`
        d_v.append(np.linalg.norm(found.descriptors[others] - found.descriptors[probe], axis=1))
        d_pi.append(np.linalg.norm(pi[others] - pi[probe], axis=1))
    # Rounded, because distances that are equal in theory may differ in the last bit and would not be ties.
    return np.array(d_v), np.array(d_pi).round(12)


def mean_correlation(d_v: Array, d_pi: Array) -> float:
    """Return the mean of Spearman's correlation over probes, as in the paper's "Analysis of Client Descriptors".

    The arguments are the result of `distances`. Rows without a correlation are left out; NaN if no row has one.
    """
    each = np.array([spearman(a, b) for a, b in zip(d_v, d_pi, strict=True)])
    each = each[~np.isnan(each)]
    return float(each.mean()) if len(each) else float("nan")


def _spaced(items: Array, most: int) -> Array:
    if len(items) <= most:
        return items
    return items[np.linspace(0, len(items) - 1, most).round().astype(np.int64)]
