"""Samples in the order of their files, and checks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.wording import counted, either
from pefll.data.raw_columns import RawColumn

TRAIN, VALIDATION, TEST = 0, 1, 2
BOOLEANS = ("False", "True")  # the classes of labels that are True or False
SPLITS = ("train", "validation", "test")
# Networks square and sum their inputs. Larger inputs soon exceed float32, which ends at 3e38.
LARGEST = 1e15

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
        time_column: name of the table's column of times, or empty.
        table: the columns of a table whose raw values x holds, float64 [N, columns] with NaN for missing ones. A
            partition learns from them what networks get, see `table_plan.TablePlan`. Empty for all other samples.
        time: float64 [N], when each sample was made, so that a client's last samples become its test samples; or None.
        unlabelled: number of a table's rows that were left out because they have no label.
        row: int64 [N], the row of the data that each sample is, from 0; None if no row was left out.
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
    time_column: str = ""
    table: tuple[RawColumn, ...] = ()
    time: Array | None = None
    unlabelled: int = 0
    row: Array | None = None

    def __post_init__(self) -> None:
        check_samples(self)

    @property
    def labels(self) -> str:
        """What labels are: `"classes"`, `"numbers"` or `"sets"`."""
        return kind_of(self.classes, self.y.dtype.kind == "f")

    def name_of(self, client: int) -> str:
        """Return the name that the data gives to natural client 0..n-1."""
        return client_called(client, self.client_names, self.client_keys)

    def __repr__(self) -> str:
        kind = "tokens" if self.tokens else str(self.x.dtype)
        labels = label_words(self.labels, self.classes, self.y.shape)
        return f"<Samples {self.name!r}: {len(self.x):,} of shape {self.x.shape[1:]} ({kind}), {labels}>"


def kind_of(classes: int, floats: bool) -> str:
    """Return what labels are, from the number of classes and whether labels are floats."""
    return "classes" if classes else "numbers" if floats else "sets"


def label_words(labels: str, classes: int, shape: tuple[int, ...]) -> str:
    """Return what labels y of this shape are, for example `"10 classes"`, `"1 number each"` or `"sets of 5"`."""
    if labels == "classes":
        return f"{classes} classes"
    columns = shape[1] if len(shape) > 1 else 1
    return f"sets of {columns}" if labels == "sets" else f"{counted(columns, 'number')} each"


def client_called(client: int, names: tuple[str, ...], keys: Array | None) -> str:
    """Return the name that the data gives to a client: its name, else its number in the data, else its number."""
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
        check_classes(y, name, classes)
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


def check_classes(y: Array, name: str, classes: int) -> None:
    """Raise PefllError for labels that are not classes [N]."""
    if not np.issubdtype(y.dtype, np.integer):
        raise PefllError(
            f"{name}: labels are {y.dtype}; convert them to whole numbers 0..{classes - 1}"
            f"{either('', ' with y.astype(int)')}",
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
            f"{name}: there is a label {high}, but with {counted(classes, 'class')} labels must be 0..{classes - 1}; "
            + ("these seem to count from 1, so subtract 1" if low == 1 and high == classes else "correct it"),
            code="PEFLL-D139",
        )


def for_classes() -> str:
    """Return what a user gives to say that labels are classes, not numbers."""
    return either("--task classification", "labels='classes'")


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


def check_is_samples(samples: object) -> None:
    """Raise PefllError for a value that is not `Samples`."""
    if not isinstance(samples, Samples):
        raise PefllError(
            f"samples are needed, not {shown(samples)}: make them with pefll.samples_from_arrays(x, y) or "
            "pefll.load_samples(name)",
            code="PEFLL-A015",
        )
