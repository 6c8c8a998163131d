"""Who has what: flat arrays once, one (offset, count) per client and split, no Python object per client."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.core.wording import counted

TRAIN, VALIDATION, TEST = 0, 1, 2
SPLITS = ("train", "validation", "test")
# Arrays are hashed in pieces of about this many bytes.
_HASHED = 1 << 24
# A network squares and sums what it is given; in float32 that ends at 3e38, and some layers are enough for it.
LARGEST = 1e15

Array = npt.NDArray[Any]


class Normalise(NamedTuple):
    """How stored pixels become a network's input: (x / 255 - mean) / std for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Samples:
    """What a data source reads: samples in the order of its files, before anybody owns them.

    Attributes:
        x: [N, ...] uint8 pixels (channels first), float32 features, or uint8/int64 tokens of text.
        y: [N] int64 labels in [0, classes).
        classes: the number of classes.
        split: [N] int8 with 0 train, 1 validation, 2 test as the makers split it; None where they did not.
        client: [N] int64 natural owner of each sample, 0..n-1; None where there is none.
        normalise: per-channel statistics for uint8 pixels; None for features and tokens, and for images whose
            statistics are to be measured once it is known which samples are for training.
        name: the name of the data set.
        class_names: one per class, or empty.
        client_names: one per natural client; empty where numbers are their names.
        client_keys: int64, these numbers; None where they are 0..n-1.
        tokens: True where x holds tokens (integers that a model embeds), so that they are never scaled.
        feature_names: one per column of x where it is a table's, or empty.
        label_column: the name of a table's column of labels, or empty.
        client_column: the name of a table's column of clients, or empty.
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

    def __post_init__(self) -> None:
        check_samples(self)

    def name_of(self, client: int) -> str:
        """Return what the data calls a natural client, 0..n-1."""
        return _name_of(client, self.client_names, self.client_keys)

    def __repr__(self) -> str:
        kind = "tokens" if self.tokens else str(self.x.dtype)
        return f"<Samples {self.name!r}: {len(self.x):,} of shape {self.x.shape[1:]} ({kind}), {self.classes} classes>"


def _name_of(client: int, names: tuple[str, ...], keys: Array | None) -> str:
    """Return a client's name, or the number that stands for one: its key, or its own."""
    if names:
        return names[client]
    return str(client if keys is None else int(keys[client]))


def check_samples(samples: Samples) -> None:
    """Raise PefllError with one sentence where the arrays of `samples` do not make sense."""
    x, y, name = samples.x, samples.y, samples.name
    total = len(x)
    if total == 0:
        raise PefllError(f"{name}: there are no samples", code="PEFLL-D134")
    for what, array in (("y", y), ("client", samples.client), ("split", samples.split)):
        if array is not None and len(array) != total:
            raise PefllError(
                f"{name}: x has {counted(total, 'sample')} but {what} has {len(array):,}; they must be equal",
                code="PEFLL-D135",
            )
    if not np.issubdtype(y.dtype, np.integer):
        raise PefllError(
            f"{name}: labels are {y.dtype}; they must be whole numbers 0..{samples.classes - 1}: convert them with "
            "y.astype(int)",
            code="PEFLL-D136",
        )
    if y.ndim != 1:
        raise PefllError(
            f"{name}: y must have one label per sample, but its shape is {tuple(y.shape)}", code="PEFLL-D137"
        )
    low, high = int(y.min()), int(y.max())
    if low < 0:
        raise PefllError(f"{name}: there is a label {low}; labels count from 0", code="PEFLL-D138")
    if high >= samples.classes:
        raise PefllError(
            f"{name}: there is a label {high}, but with {counted(samples.classes, 'class')} labels must be "
            f"0..{samples.classes - 1}",
            code="PEFLL-D139",
        )
    if not (np.issubdtype(x.dtype, np.integer) or np.issubdtype(x.dtype, np.floating)):
        raise PefllError(
            f"{name}: x is {x.dtype}; it must hold numbers (uint8 pixels, float features or tokens)", code="PEFLL-D140"
        )
    if samples.feature_names and x.shape[1:] != (len(samples.feature_names),):
        raise PefllError(
            f"{name}: there are {len(samples.feature_names)} feature names for samples of shape {list(x.shape[1:])}",
            code="PEFLL-D141",
        )
    if np.issubdtype(x.dtype, np.floating):
        _check_range(samples)


def _check_range(samples: Samples) -> None:
    """Raise PefllError for the first value that no training survives; it names the client, the column and the range."""
    x = samples.x
    block = max(1, (1 << 24) // max(1, x[0].size))  # so that big arrays need no big mask
    for start in range(0, len(x), block):
        flat = x[start : start + block].reshape(-1, x[0].size)
        if flat.min() >= -LARGEST and flat.max() <= LARGEST:  # no NaN passes this
            continue
        fine = np.abs(flat) <= LARGEST
        row = int(np.argmin(fine.all(axis=1)))
        column = int(np.argmin(fine[row]))
        value, sample = float(flat[row, column]), start + row
        where = feature_called(column, x.shape[1:], samples.feature_names)
        whose, mine = "", x.reshape(len(x), -1)[:, column]
        if samples.client is not None:
            client = int(samples.client[sample])
            whose, mine = f", of client {samples.name_of(client)},", mine[samples.client == client]
        if not np.isfinite(value):
            raise PefllError(
                f"{samples.name}: sample {sample} of x{whose} has a NaN or infinite value in {where}; remove or "
                "fill it",
                code="PEFLL-D010",
            )
        sound = mine[np.abs(mine) <= LARGEST]
        others = f" (its others are {sound.min():.3g} to {sound.max():.3g})" if len(sound) else ""
        raise PefllError(
            f"{samples.name}: sample {sample} of x{whose} has {value:.3g} in {where}{others}; no network can be "
            f"trained on values beyond {LARGEST:g}: mend or scale it",
            code="PEFLL-D011",
        )


def feature_called(column: int, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """Return what one of a sample's values is called: a table's column, or where it lies in an array of some shape."""
    if names:
        return f"column {names[column]!r}"
    place = np.unravel_index(column, shape)
    return f"feature {column}" if len(shape) == 1 else f"the value at [{', '.join(str(int(each)) for each in place)}]"


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients and their samples.

    Client i's samples of split s are the rows `rows[offset[s, i] : offset[s, i] + count[s, i]]` of `x` and `y`. Clients
    0..num_seen-1 take part in training, the others never do.

    Attributes:
        x: [N, ...] in the type it is stored in (uint8 pixels stay uint8).
        y: int64 [N].
        rows: int64 [R], indices into x and y, grouped by client and split.
        offset: int64 [3, n].
        count: int64 [3, n].
        num_seen: clients 0..num_seen-1 are seen.
        classes: the number of classes.
        normalise: see `Normalise`; None where x is used as it is.
        tokens: True where x holds tokens.
        name: of the data set.
        partition: in words, for example `"by-class 2"`.
        class_names: one per class, or empty.
        feature_names: one per column of x where it is a table's, or empty.
        keys: int64 [n], what natural clients are called in the data; None where clients were made, or have names.
        names: of natural clients, or empty.
        label_column: the name of a table's column of labels, or empty.
        client_column: the name of a table's column of clients, or empty.
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
    _cache: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        train = self.count[TRAIN]
        if self.num_clients == 0:
            raise PefllError(f"{self.name}: the federation has no clients", code="PEFLL-D142")
        if int(train.min()) < 1:
            raise PefllError(
                f"{self.name}: client {int(train.argmin())} has no training samples; "
                "drop such clients or make fewer of them",
                code="PEFLL-D143",
            )
        if not 0 <= self.num_seen <= self.num_clients:
            raise PefllError(
                f"{self.name}: num_seen is {self.num_seen} of {self.num_clients} clients", code="PEFLL-D144"
            )

    def name_of(self, client: int) -> str:
        """Return what the data calls a client; its number in the federation where clients were made."""
        return _name_of(client, self.names, self.keys)

    def __repr__(self) -> str:
        untested = f", {self.num_untested:,} without test samples" if self.num_untested else ""
        return (
            f"<Federation {self.name!r}, {self.partition}: {self.num_clients:,} clients "
            f"({self.num_seen:,} seen, {self.num_unseen:,} unseen{untested}), {len(self.rows):,} samples of shape "
            f"{self.input_shape}, {self.classes} classes>"
        )

    @property
    def num_clients(self) -> int:
        """All clients, seen and unseen."""
        return self.count.shape[1]

    @property
    def num_unseen(self) -> int:
        """Clients that never take part in training."""
        return self.num_clients - self.num_seen

    @property
    def num_untested(self) -> int:
        """Clients without a test sample, of which no accuracy knows; 0 where only they know what they have."""
        return int((self.count[TEST] == 0).sum()) if len(self.rows) else 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def holds_images(self) -> bool:
        """Whether x holds uint8 images, which are never used without `normalise`."""
        return self.x.dtype == torch.uint8 and self.x.ndim == 4 and not self.tokens

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.x.device

    def to(self, device: torch.device | str, copies: dict[object, Tensor] | None = None) -> Federation:
        """Return the same federation with its arrays on `device`.

        Args:
            device: where to.
            copies: what other federations have moved there; an array that they share with this one is moved once.
                The federations must be kept until all are moved, since arrays are known by their addresses.
        """
        there = {} if copies is None else copies

        def move(array: Tensor) -> Tensor:
            key = (str(device), array.device, array.data_ptr(), array.shape, array.stride(), array.dtype)
            if key not in there:
                there[key] = array.to(device)
            return there[key]

        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in ("x", "y", "rows", "offset", "count")}
        return replace(self, **moved)

    def holding_out(self, share: float) -> Federation:
        """Return the seen clients alone, of which the last are as if unseen: to choose something by who does not train.

        Args:
            share: of the seen clients that are held out; at least one is, and at least one is not.
        """
        held = max(1, round(share * self.num_seen))
        if not 0 < share < 1 or held >= self.num_seen:
            raise PefllError(
                f"{self.name}: {share} of {counted(self.num_seen, 'seen client')} cannot be held out: some must stay",
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

    def histograms(self, split: int = TRAIN) -> Array:
        """Return how many samples of each class every client has, int64 [n, classes]."""
        offset, count = self.offset[split].cpu().numpy(), self.count[split].cpu().numpy()
        labels = self.y.cpu().numpy()[self.rows.cpu().numpy()[places(offset, count)]]
        owner = np.repeat(np.arange(self.num_clients), count)
        table = np.bincount(owner * self.classes + labels, minlength=self.num_clients * self.classes)
        return table.reshape(self.num_clients, self.classes)

    def fingerprint(self) -> str:
        """Return a SHA-256 over everything training depends on: every sample, who has it, and what it means."""
        if "sha256" not in self._cache:
            digest = hashlib.sha256()
            digest.update(repr((self.num_seen, self.classes, self.normalise, self.tokens)).encode())
            for tensor in (self.x, self.y, self.rows, self.offset, self.count):
                digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
                step = max(1, _HASHED // max(1, tensor[:1].nbytes))
                for start in range(0, len(tensor), step):
                    # On the CPU this is the tensor's own memory, not a copy.
                    block = tensor[start : start + step].cpu().contiguous().numpy()
                    digest.update(block.reshape(-1).view(np.uint8).data)
            self._cache["sha256"] = digest.hexdigest()
        return str(self._cache["sha256"])

    def take(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return samples `rows` [b] as networks take them, [b, ...]."""
        return gather(self, rows, dtype)

    def prepare(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return stored samples as networks take them: normalised pixels, plain features, or long tokens.

        Args:
            x: [b, ...] of the stored type, on the federation's device.
            dtype: floating type of the result; tokens become int64.
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
        """Return what pixels are multiplied by and what is added then, each [channels, 1, 1]."""
        # Kept on the device: a copy from the host inside a CUDA graph is not allowed.
        if dtype not in self._cache:
            assert self.normalise is not None
            shape = (-1,) + (1,) * (len(self.input_shape) - 1)
            mean, std = (torch.tensor(value, dtype=torch.float64).reshape(shape) for value in self.normalise)
            self._cache[dtype] = ((1 / (255 * std)).to(self.device, dtype), (-mean / std).to(self.device, dtype))
        scale, shift = self._cache[dtype]
        return scale, shift


@reference
def gather(federation: Federation, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return samples `rows` [b] of a federation as networks take them, [b, ...]."""
    # `index_select` copies whole samples where indexing would copy number by number.
    return federation.prepare(federation.x.index_select(0, rows), dtype)


def places(offset: Array, count: Array) -> Array:
    """Return offset[0], offset[0] + 1, ... (count[0] of them), then those from offset[1] on, and so on, int64 [R]."""
    start = np.cumsum(count) - count
    steps: Array = np.arange(int(count.sum())) + np.repeat(offset - start, count)
    return steps


def _tensor(array: Array) -> Tensor:
    """Return an array as a tensor, without a copy where it can be; nobody writes to it."""
    contiguous = np.ascontiguousarray(array)
    # A user's read-only or mapped array is as good as any other here. torch would warn of it, and to filter warnings is
    # a setting of the whole process.
    return torch.from_numpy(contiguous if contiguous.flags.writeable else np.asarray(_CalledWritable(contiguous)))


class _CalledWritable:
    """The same memory as an array's, which is kept as long as this is."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def check_is_federation(value: Any) -> None:
    """Raise PefllError for what is no federation."""
    if not isinstance(value, Federation):
        given = f"a {type(value).__name__}" if isinstance(value, tuple | list | dict) else shown(value)
        raise PefllError(
            f"a federation is needed, not {given}: make one with pefll.federation_from_arrays(x, y, client), "
            "or of samples with pefll.make_federation(samples, ...)",
            code="PEFLL-A019",
        )


def assemble(
    samples: Samples, owner: Array, split: Array, num_seen: int, partition: str, rows: Array | None = None
) -> Federation:
    """Group samples by client and split.

    Args:
        samples: where x, y and their meaning come from.
        owner: int64 [R], the client of each entry, 0..n-1; negative where nobody gets it.
        split: int8 [R], the split of each entry.
        num_seen: how many clients are seen; they are the first.
        partition: in words.
        rows: int64 [R], the sample of each entry; by default entry r is sample r.

    Returns:
        The federation. Within a client and split the entries keep their order.
    """
    taken = np.flatnonzero(owner >= 0)
    if len(taken) == 0:
        raise PefllError(f"{samples.name}: the partition gives no samples to anybody", code="PEFLL-D147")
    slot = owner[taken] * 3 + split[taken]
    order = taken[np.argsort(slot, kind="stable")]
    clients = int(owner.max()) + 1
    count = np.bincount(slot, minlength=3 * clients).reshape(clients, 3)
    offset = np.concatenate([[0], np.cumsum(count.reshape(-1))[:-1]]).reshape(clients, 3)
    x = samples.x if samples.x.dtype != np.float64 else samples.x.astype(np.float32)
    return Federation(
        x=_tensor(x),
        y=_tensor(samples.y.astype(np.int64, copy=False)),
        rows=torch.from_numpy((order if rows is None else rows[order]).astype(np.int64, copy=False)),
        offset=torch.from_numpy(np.ascontiguousarray(offset.T)),
        count=torch.from_numpy(np.ascontiguousarray(count.T).astype(np.int64)),
        num_seen=num_seen,
        classes=samples.classes,
        normalise=samples.normalise,
        tokens=samples.tokens,
        name=samples.name,
        partition=partition,
        class_names=samples.class_names,
        feature_names=samples.feature_names,
        label_column=samples.label_column,
        client_column=samples.client_column,
    )
