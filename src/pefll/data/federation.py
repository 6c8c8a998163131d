"""Federations of clients. They are flat arrays, without a Python object per client."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.core.wording import counted
from pefll.data.samples import TEST, TRAIN, Array, Normalise, client_called, kind_of, label_words
from pefll.data.table_plan import TablePlan

# Number of bytes that are hashed at a time.
_HASHED = 1 << 24


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients and their samples.

    Client i's samples of split s are the rows `rows[offset[s, i] : offset[s, i] + count[s, i]]` of `x` and `y`. Clients
    0..num_seen-1 take part in training (seen), the others never do (unseen). `Samples` explains the other attributes.

    Attributes:
        x: [N, ...] in the stored type (uint8 pixels stay uint8).
        y: labels, see `Samples`.
        rows: int64 [R], indices into x and y, grouped by client and split.
        offset: int64 [3, n], start of each client's part of `rows`, per split.
        count: int64 [3, n], number of each client's samples, per split.
        num_seen: number of seen clients.
        partition: the partition in words, for example `"by-class 2"`.
        keys: int64 [n], numbers of natural clients in the data; None if they have names or the partition made them.
        names: names of natural clients, or empty.
        named_unseen: whether a user named the unseen clients, so that they are no random choice.
        tests_last: whether each client's test samples are its last ones in time, and no random choice.
        table: what was done to each column of a table to make x; None for other data.
        row: int64 [N], the row of the data that each sample is, from 0; None if no row was left out.
        index: the index of the pandas data frame that it was made from, with an entry for each row; or None.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    offset: Tensor
    count: Tensor
    num_seen: int
    classes: int
    normalise: Normalise | None = None
    tokens: bool = False
    name: str = "arrays"
    partition: str = "natural"
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    keys: Array | None = None
    names: tuple[str, ...] = ()
    label_column: str = ""
    client_column: str = ""
    time_column: str = ""
    named_unseen: bool = False
    tests_last: bool = False
    table: TablePlan | None = None
    row: Array | None = None
    index: Any = None
    _raw: dict[str, Array] = field(default_factory=dict, repr=False)  # raw values of the table, as `x`, until checked
    _cache: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        train = self.count[TRAIN]
        if self.num_clients == 0:
            raise PefllError(f"{self.name}: the federation has no clients", code="PEFLL-D142")
        if int(train.min()) < 1:
            raise PefllError(
                f"{self.name}: client {int(train.argmin())} has no training samples; "
                "leave such clients out, or make fewer",
                code="PEFLL-D143",
            )
        if not 0 <= self.num_seen <= self.num_clients:
            raise PefllError(
                f"{self.name}: num_seen is {self.num_seen}; it must be 0..{self.num_clients}, the number of clients",
                code="PEFLL-D144",
            )

    def name_of(self, client: int) -> str:
        """Return the name or number of a client in the data; without these, its number in the federation."""
        return client_called(client, self.names, self.keys)

    def __repr__(self) -> str:
        untested = f", {self.num_untested:,} without test samples" if self.num_untested else ""
        return (
            f"<Federation {self.name!r}, {self.partition}: {self.num_clients:,} clients "
            f"({self.num_seen:,} seen, {self.num_unseen:,} unseen{untested}), {len(self.rows):,} samples of shape "
            f"{self.input_shape}, {label_words(self.labels, self.classes, self.y.shape)}>"
        )

    @property
    def labels(self) -> str:
        """What labels are: `"classes"`, `"numbers"` or `"sets"`."""
        return kind_of(self.classes, self.y.is_floating_point())

    @property
    def num_clients(self) -> int:
        """Number of all clients, seen and unseen."""
        return self.count.shape[1]

    @property
    def num_unseen(self) -> int:
        """Number of clients that never take part in training."""
        return self.num_clients - self.num_seen

    @property
    def num_untested(self) -> int:
        """Number of clients without a test sample; 0 if the clients' data is on other machines."""
        return int((self.count[TEST] == 0).sum()) if len(self.rows) else 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def holds_images(self) -> bool:
        """Whether x holds uint8 images; networks need `normalise` for them."""
        return self.x.dtype == torch.uint8 and self.x.ndim == 4 and not self.tokens

    @property
    def device(self) -> torch.device:
        """The device of the arrays."""
        return self.x.device

    def to(self, device: torch.device | str, copies: dict[object, Tensor] | None = None) -> Federation:
        """Return the same federation with its arrays on `device`.

        Federations may share arrays. Calls with the same `copies` move each array only once. Keep the federations alive
        until the last call, because `copies` identifies arrays by their addresses.
        """
        moved = {} if copies is None else copies

        def move(array: Tensor) -> Tensor:
            key = (str(device), array.device, array.data_ptr(), array.shape, array.stride(), array.dtype)
            if key not in moved:
                moved[key] = array.to(device)
            return moved[key]

        arrays: dict[str, Any] = {name: move(getattr(self, name)) for name in ("x", "y", "rows", "offset", "count")}
        return replace(self, **arrays)

    def holding_out(self, share: float) -> Federation:
        """Return a federation of the seen clients only. The last of them, a fraction `share`, become unseen."""
        held = max(1, round(share * self.num_seen))
        if not 0 < share < 1 or held >= self.num_seen:
            raise PefllError(
                f"{self.name}: {share} of {counted(self.num_seen, 'seen client')} cannot be held out; give a share "
                "that holds out at least one client and keeps at least one",
                code="PEFLL-D145",
            )
        seen = slice(0, self.num_seen)
        return replace(
            self,
            offset=self.offset[:, seen].contiguous(),
            count=self.count[:, seen].contiguous(),
            num_seen=self.num_seen - held,
            keys=None if self.keys is None else self.keys[seen],
            names=self.names[seen],
            named_unseen=False,
        )

    def indices(self, client: int, split: int = TRAIN) -> Tensor:
        """Return the indices into x and y of one client's samples of one split, int64 [count]."""
        start = int(self.offset[split, client])
        return self.rows[start : start + int(self.count[split, client])]

    def rows_of_clients(self, split: int, first: int = 0, last: int | None = None) -> Array:
        """Return the indices into x and y of the samples of clients first..last-1 in a split, by client, int64 [R]."""
        offset = self.offset[split, first:last].cpu().numpy()
        count = self.count[split, first:last].cpu().numpy()
        start = np.cumsum(count) - count
        rows: Array = self.rows.cpu().numpy()[np.arange(int(count.sum())) + np.repeat(offset - start, count)]
        return rows

    def histograms(self, split: int = TRAIN) -> Array:
        """Return each client's number of samples per class, int64 [n, classes].

        Sets count for each member. Numbers are put into ten groups with equally many samples, by the first column.
        """
        labels = self.y.cpu().numpy()[self.rows_of_clients(split)]
        owner = np.repeat(np.arange(self.num_clients), self.count[split].cpu().numpy())
        groups = self.classes
        if self.labels == "sets":
            sample, labels = np.nonzero(labels)
            owner, groups = owner[sample], self.y.shape[1]
        elif self.labels == "numbers":
            first, groups = labels.reshape(len(labels), -1)[:, 0], 10
            labels = np.searchsorted(np.quantile(first, np.arange(1, groups) / groups), first, side="right")
        table = np.bincount(owner * groups + labels, minlength=self.num_clients * groups)
        return table.reshape(self.num_clients, groups)

    def fingerprint(self) -> str:
        """Return a SHA-256 of all that training depends on: samples, owners, splits, classes and normalisation."""
        if "sha256" not in self._cache:
            digest = hashlib.sha256()
            digest.update(repr((self.num_seen, self.classes, self.normalise, self.tokens)).encode())
            if self.table is not None:
                digest.update(json.dumps(self.table.to_json(), sort_keys=True).encode())
            for tensor in (self.x, self.y, self.rows, self.offset, self.count):
                digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
                step = max(1, _HASHED // max(1, tensor[:1].nbytes))
                for start in range(0, len(tensor), step):
                    # For a tensor on the CPU, this line copies nothing.
                    block = tensor[start : start + step].cpu().contiguous().numpy()
                    digest.update(block.reshape(-1).view(np.uint8).data)
            self._cache["sha256"] = digest.hexdigest()
        return str(self._cache["sha256"])

    def take(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the samples with indices `rows` [b] as inputs of networks, [b, ...]."""
        return gather(self, rows, dtype)

    def prepare(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return stored samples x [b, ...] as inputs of networks.

        Pixels are normalised. Pixels and features are converted to `dtype`, tokens to int64.
        """
        if self.tokens:
            return x.long()
        if self.normalise is None:
            if self.holds_images:
                raise PefllError(
                    f"{self.name}: its pixels have no channel statistics; pass the federation through "
                    "pefll.data.with_channel_stats",
                    code="PEFLL-D146",
                )
            return x.to(dtype)
        scale, shift = self.affine(dtype)
        return x.to(dtype, copy=True).mul_(scale).add_(shift)

    def affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the scale and the shift that normalise pixels, each [channels, 1, 1]."""
        # Both are cached on the device, because a CUDA graph must not copy from the host.
        if dtype not in self._cache:
            assert self.normalise is not None
            shape = (-1,) + (1,) * (len(self.input_shape) - 1)
            mean, std = (torch.tensor(value, dtype=torch.float64).reshape(shape) for value in self.normalise)
            self._cache[dtype] = ((1 / (255 * std)).to(self.device, dtype), (-mean / std).to(self.device, dtype))
        scale, shift = self._cache[dtype]
        return scale, shift


@reference
def gather(federation: Federation, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the samples of a federation with indices `rows` [b] as inputs of networks, [b, ...]."""
    # `index_select` copies a sample at once; indexing with brackets copies number by number.
    return federation.prepare(federation.x.index_select(0, rows), dtype)


def check_is_federation(value: Any) -> None:
    """Raise PefllError for a value that is not a federation."""
    if not isinstance(value, Federation):
        given = f"a {type(value).__name__}" if isinstance(value, tuple | list | dict) else shown(value)
        raise PefllError(
            f"a federation is needed, not {given}: make one with pefll.federation_from_arrays(x, y, client), "
            "or from samples with pefll.make_federation(samples, ...)",
            code="PEFLL-A019",
        )
