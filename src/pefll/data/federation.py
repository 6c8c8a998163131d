"""Samples and federations of clients. They are flat arrays, without a Python object per client."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.core.wording import counted, either
from pefll.data.plan_learning import learn
from pefll.data.raw_columns import RawColumn
from pefll.data.table_plan import TablePlan

TRAIN, VALIDATION, TEST = 0, 1, 2
SPLITS = ("train", "validation", "test")
# Number of bytes that are hashed at a time.
_HASHED = 1 << 24
# Networks square and sum their inputs. Larger inputs soon exceed float32, which ends at 3e38.
LARGEST = 1e15
# A table's raw values are kept until the start of training if one is beyond this: `ranges` looks for mistakes in them.
_LARGE = 1e3

# Attributes that a federation copies from its samples.
_MEANING = ("classes", "normalise", "tokens", "name", "class_names", "feature_names", "label_column", "client_column")

Array = npt.NDArray[Any]


class Normalise(NamedTuple):
    """Mean and standard deviation of pixels per channel; a network's input is (x / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in the order of their files, before a partition gives them to clients.

    Attributes:
        x: [N, ...] uint8 pixels (channels first), float32 features, or uint8/int64 tokens of text.
        y: labels. Classes are int64 [N] in [0, classes), numbers are float32 [N] or [N, k], and sets are int64 [N, k]
            with 1 for each member.
        classes: number of classes; 0 if labels are numbers or sets.
        split: [N] int8 with 0 train, 1 validation, 2 test; None if the data is not split.
        client: [N] int64, the natural client (owner in the data) of each sample, 0..n-1; None if the data has none.
        normalise: channel statistics of uint8 pixels. None for features and tokens. Also None for images whose
            statistics are computed later, from training samples only.
        name: name of the data set.
        class_names: one name per class; for numbers and sets, one name per column of y. It may be empty.
        client_names: one name per natural client; empty if clients have numbers.
        tokens: whether x holds integers that a model embeds; they are never scaled.
        feature_names: one name per column of a table, or empty.
        client_keys: int64 [n], the clients' numbers in the data; None if they are 0..n-1.
        label_column: name of the table's column of labels, or empty.
        client_column: name of the table's column of clients, or empty.
        table: the columns of a table whose raw values x holds, float64 [N, columns] with NaN for missing ones. A
            partition learns from them what networks get, see `columns.TablePlan`. Empty for all other samples.
        time: float64 [N], when each sample was made, so that a client's last samples become its test samples; or None.
    """

    x: Array
    y: Array
    classes: int
    split: Array | None = None
    client: Array | None = None
    normalise: Normalise | None = None
    name: str = "arrays"
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    tokens: bool = False
    feature_names: tuple[str, ...] = ()
    client_keys: Array | None = None
    label_column: str = ""
    client_column: str = ""
    table: tuple[RawColumn, ...] = ()
    time: Array | None = None

    def __post_init__(self) -> None:
        check_samples(self)

    @property
    def labels(self) -> str:
        """What labels are: `"classes"`, `"numbers"` or `"sets"`."""
        return _kind_of(self.classes, self.y.dtype.kind == "f")

    def name_of(self, client: int) -> str:
        """Return the name that the data gives to natural client 0..n-1."""
        return _name_of(client, self.client_names, self.client_keys)

    def __repr__(self) -> str:
        kind = "tokens" if self.tokens else str(self.x.dtype)
        labels = label_words(self.labels, self.classes, self.y.shape)
        return f"<Samples {self.name!r}: {len(self.x):,} of shape {self.x.shape[1:]} ({kind}), {labels}>"


def _kind_of(classes: int, floats: bool) -> str:
    return "classes" if classes else "numbers" if floats else "sets"


def label_words(labels: str, classes: int, shape: tuple[int, ...]) -> str:
    """Return what labels y of this shape are, for example `"10 classes"`, `"1 number each"` or `"sets of 5"`."""
    if labels == "classes":
        return f"{classes} classes"
    columns = shape[1] if len(shape) > 1 else 1
    return f"sets of {columns}" if labels == "sets" else f"{counted(columns, 'number')} each"


def _name_of(client: int, names: tuple[str, ...], keys: Array | None) -> str:
    if names:
        return names[client]
    return str(client if keys is None else int(keys[client]))


def check_samples(samples: Samples) -> None:
    """Raise PefllError for arrays that do not fit together, and for labels or values out of range."""
    x, y, name, classes = samples.x, samples.y, samples.name, samples.classes
    total = len(x)
    if total == 0:
        raise PefllError(f"{name}: there are no samples", code="PEFLL-D134")
    for what, array in (("y", y), ("client", samples.client), ("split", samples.split), ("time", samples.time)):
        if array is not None and len(array) != total:
            raise PefllError(
                f"{name}: x has {counted(total, 'sample')} but {what} has {len(array):,}; they must be equal",
                code="PEFLL-D135",
            )
    if classes == 0 and (y.dtype.kind == "f" or y.ndim > 1):
        _check_other_labels(y, name)
    else:
        _check_classes(y, name, classes)
    if x.dtype.kind not in "uif":
        raise PefllError(
            f"{name}: x is {x.dtype}; it must hold numbers (uint8 pixels, float features or tokens)", code="PEFLL-D140"
        )
    if samples.feature_names and x.shape[1:] != (len(samples.feature_names),):
        raise PefllError(
            f"{name}: there are {len(samples.feature_names)} feature names for samples of shape {list(x.shape[1:])}; "
            "give one name per column",
            code="PEFLL-D141",
        )
    if x.dtype.kind == "f":
        _check_range(samples)


def _check_classes(y: Array, name: str, classes: int) -> None:
    """Raise PefllError for labels that are not classes [N]."""
    if not np.issubdtype(y.dtype, np.integer):
        raise PefllError(
            f"{name}: labels are {y.dtype}; convert them to whole numbers 0..{classes - 1} with y.astype(int)",
            code="PEFLL-D136",
        )
    if y.ndim != 1:
        raise PefllError(
            f"{name}: y must have one label per sample, but its shape is {tuple(y.shape)}", code="PEFLL-D137"
        )
    low, high = int(y.min()), int(y.max())
    if low < 0:
        raise PefllError(
            f"{name}: there is a label {low}; classes count from 0, and labels that are other numbers need "
            f"{for_numbers()}",
            code="PEFLL-D138",
        )
    if high >= classes:
        raise PefllError(
            f"{name}: there is a label {high}, but with {counted(classes, 'class')} labels must be 0..{classes - 1}",
            code="PEFLL-D139",
        )


def for_numbers() -> str:
    """Return what a user gives to say that labels are numbers, not classes."""
    return either("--task regression", "labels='numbers'")


def _check_other_labels(y: Array, name: str) -> None:
    """Raise PefllError for labels that are neither numbers [N] or [N, k] nor sets [N, k]."""
    if y.ndim > 2 or 0 in y.shape[1:]:
        raise PefllError(
            f"{name}: y has the shape {list(y.shape)}; numbers have the shape [N] or [N, k], and sets [N, k]",
            code="PEFLL-D500",
        )
    if y.dtype.kind == "f":
        fine = np.abs(y) <= LARGEST  # False for NaN
        if not fine.all():
            row = int(np.argmin(fine.reshape(len(y), -1).all(axis=1)))
            raise PefllError(
                f"{name}: the label of sample {row} is {y[row]}; labels must be finite numbers of at most "
                f"{LARGEST:g}: correct it or leave the sample out",
                code="PEFLL-D501",
            )
    elif y.dtype.kind not in "ui" or not ((y == 0) | (y == 1)).all():
        raise PefllError(
            f"{name}: y has several columns of {y.dtype}; a set has 1 for each member and 0 for the others, and other "
            "numbers must be floats, such as y.astype(float)",
            code="PEFLL-D502",
        )


def _check_range(samples: Samples) -> None:
    """Raise PefllError, with client and column, for the first value that is not finite or beyond `LARGEST`.

    In the raw values of a table, NaN stands for a missing value, and is none of these.
    """
    x = samples.x
    block = max(1, (1 << 24) // max(1, x[0].size))  # limits the memory of the mask
    for start in range(0, len(x), block):
        flat = x[start : start + block].reshape(-1, x[0].size)
        if flat.min() >= -LARGEST and flat.max() <= LARGEST:  # False for NaN
            continue
        fine = np.abs(flat) <= LARGEST
        if samples.table:
            fine |= np.isnan(flat)
            if fine.all():
                continue
        row = int(np.argmin(fine.all(axis=1)))
        column = int(np.argmin(fine[row]))
        value, sample = float(flat[row, column]), start + row
        where = feature_called(column, x.shape[1:], samples.feature_names)
        owner, same_column = "", x.reshape(len(x), -1)[:, column]
        if samples.client is not None:
            client = int(samples.client[sample])
            owner, same_column = f", of client {samples.name_of(client)},", same_column[samples.client == client]
        if not np.isfinite(value):
            raise PefllError(
                f"{samples.name}: sample {sample} of x{owner} has a NaN or infinite value in {where}; remove or "
                "fill it",
                code="PEFLL-D010",
            )
        usual = same_column[np.abs(same_column) <= LARGEST]
        others = f" (its others are {usual.min():.3g} to {usual.max():.3g})" if len(usual) else ""
        raise PefllError(
            f"{samples.name}: sample {sample} of x{owner} has {value:.3g} in {where}{others}; no network can be "
            f"trained on values beyond {LARGEST:g}: correct or scale it",
            code="PEFLL-D011",
        )


def feature_called(column: int, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """Return words for one value of a sample: the name of its table column, or its position in `shape`."""
    if names:
        return f"column {names[column]!r}"
    place = [int(each) for each in np.unravel_index(column, shape)]
    return f"feature {column}" if len(shape) == 1 else f"the value at {place}"


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
        table: what was done to each column of a table to make x; None for other data.
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
    table: TablePlan | None = None
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
        return _name_of(client, self.names, self.keys)

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
        return _kind_of(self.classes, self.y.is_floating_point())

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
                    f"{self.name}: its pixels have no channel statistics; make the federation with make_federation, "
                    "or pass it through pefll.data.with_channel_stats",
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


def check_is_federation(value: Any) -> None:
    """Raise PefllError for a value that is not a federation."""
    if not isinstance(value, Federation):
        given = f"a {type(value).__name__}" if isinstance(value, tuple | list | dict) else shown(value)
        raise PefllError(
            f"a federation is needed, not {given}: make one with pefll.federation_from_arrays(x, y, client), "
            "or from samples with pefll.make_federation(samples, ...)",
            code="PEFLL-A019",
        )


def assemble(
    samples: Samples, owner: Array, split: Array, num_seen: int, partition: str, rows: Array | None = None
) -> Federation:
    """Return the federation in which entry r gives sample `rows[r]` to client `owner[r]`, in the split `split[r]`.

    Within a client and split, the entries keep their order.

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
    return made


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
