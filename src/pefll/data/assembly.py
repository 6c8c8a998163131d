"""Makes a federation from samples, and from the client and split of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.data.federation import Federation
from pefll.data.normalise import with_channel_stats
from pefll.data.plan_learning import learn
from pefll.data.samples import TRAIN, Array, Samples
from pefll.data.table_plan import TablePlan

# A table's raw values are kept until the start of training if one is beyond this: `ranges` looks for mistakes in them.
_LARGE = 1e3
# Attributes that a federation copies from its samples.
_MEANING = (
    *("classes", "normalise", "tokens", "name", "class_names", "feature_names"),
    *("label_column", "client_column", "time_column", "row"),
)


def assemble(
    samples: Samples, owner: Array, split: Array, num_seen: int, partition: str, rows: Array | None = None
) -> Federation:
    """Return the federation in which entry r gives sample `rows[r]` to client `owner[r]`, in the split `split[r]`.

    Within a client and split, the entries keep their order. Images without channel statistics get those of the seen
    clients' training samples.

    Args:
        samples: the samples.
        owner: int64 [R], the client of each entry, 0..n-1; negative if no client gets the sample.
        split: int8 [R], the split of each entry.
        num_seen: number of seen clients, which are the first.
        partition: the partition in words.
        rows: int64 [R], the sample of each entry; by default entry r is sample r.
    """
    taken = np.flatnonzero(owner >= 0)
    if len(taken) == 0:
        raise PefllError(f"{samples.name}: the partition gives no sample to any client", code="PEFLL-D147")
    slot = owner[taken] * 3 + split[taken]
    order = taken[np.argsort(slot, kind="stable")]
    clients = int(owner.max()) + 1
    count = np.bincount(slot, minlength=3 * clients).reshape(clients, 3)
    offset = np.concatenate([[0], np.cumsum(count.reshape(-1))[:-1]]).reshape(clients, 3)
    raw = samples.x if samples.table else None
    samples, table = _encoded(samples, owner, split, num_seen, taken, rows)
    x = samples.x if samples.x.dtype != np.float64 else samples.x.astype(np.float32)
    made = Federation(
        x=_tensor(x),
        y=_tensor(samples.y.astype(np.float32 if samples.labels == "numbers" else np.int64, copy=False)),
        rows=torch.from_numpy((order if rows is None else rows[order]).astype(np.int64, copy=False)),
        offset=torch.from_numpy(np.ascontiguousarray(offset.T)),
        count=torch.from_numpy(np.ascontiguousarray(count.T).astype(np.int64)),
        num_seen=num_seen,
        partition=partition,
        table=table,
        **{name: getattr(samples, name) for name in _MEANING},
    )
    if raw is not None and max(np.fmax.reduce(raw, axis=None), -np.fmin.reduce(raw, axis=None)) > _LARGE:
        made._raw["x"] = raw
    return with_channel_stats(made)


def _encoded(
    samples: Samples, owner: Array, split: Array, num_seen: int, taken: Array, rows: Array | None
) -> tuple[Samples, TablePlan | None]:
    """Return the samples with a table's columns as inputs of networks, and the plan that made them.

    The plan is learned from the training rows of seen clients: no other row may influence training.
    """
    if not samples.table:
        return samples, None
    entries = taken[(owner[taken] < max(1, num_seen)) & (split[taken] == TRAIN)]
    of_samples = entries if rows is None else rows[entries]
    plan = learn(samples.table, samples.x, of_samples, owner[entries], samples.name)
    x = plan.inputs(samples.table, samples.x)
    return replace(samples, x=x, table=(), feature_names=plan.input_names), plan


def _tensor(array: Array) -> Tensor:
    """Return an array as a tensor, if possible without a copy. Callers must not write to the tensor."""
    contiguous = np.ascontiguousarray(array)
    # torch warns of read-only arrays. A filter for this warning would apply to the whole process.
    return torch.from_numpy(contiguous if contiguous.flags.writeable else np.asarray(_CalledWritable(contiguous)))


class _CalledWritable:
    """Presents the memory of a read-only array as writable, and keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
