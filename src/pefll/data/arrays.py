"""Makes samples from a user's arrays, and checks all data of users."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from pefll.core.arguments import listed, shown, text, truth, whole_number
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.wording import counted, either, first_few
from pefll.data.dates import is_date
from pefll.data.label_advice import advice, described, many_numbers
from pefll.data.raw_columns import DATE, NUMBER, has_commas, is_missing, is_number, read_column
from pefll.data.samples import BOOLEANS, SPLITS, TEST, TRAIN, VALIDATION, Array, Samples, for_classes, for_numbers

# Words for the three splits in users' files.
_SPLIT_WORDS = {"train": TRAIN, "training": TRAIN, "validation": VALIDATION, "valid": VALIDATION, "val": VALIDATION}
_SPLIT_WORDS |= {"test": TEST, "testing": TEST}
# What labels may be: classes, numbers, sets of classes; with "auto", their type and shape tell.
LABELS = ("auto", "classes", "numbers", "sets")
# If a user does not give `classes`, a label above this and above the number of samples is an error.
_MANY_CLASSES = 1000
_MOST_CLASSES = 1_000_000
_LONG_NAME = 1000  # most characters in the name of a class or client
_FEW_LABELS = 50  # so many texts may all be different, and classes nevertheless


def samples_from_arrays(
    x: Any,
    y: Any,
    client: Any = None,
    split: Any = None,
    classes: int | None = None,
    name: str = "arrays",
    *,
    tokens: bool = False,
    feature_names: Sequence[str] = (),
    labels: str = "auto",
    label_names: Sequence[str] = (),
    time: Any = None,
) -> Samples:
    """Return checked samples from a user's arrays, lists or tensors.

    Args:
        x: [N, ...] numbers, see `inputs`.
        y: labels. Classes are [N] whole numbers from 0 (not floats), True and False, or texts, which are sorted and
            numbered. Numbers are [N] or [N, k] floats. Sets are [N, k] with True or 1 for each member.
        client: [N] the owner of each sample: any whole numbers or texts.
        split: [N] 0, 1, 2 or train, validation, test; None if the partition chooses the splits.
        classes: number of classes; by default the largest label + 1.
        name: name of the data, for errors and records.
        tokens: whether x holds tokens (integers that a model embeds).
        feature_names: names of the columns of x [N, features].
        labels: what labels are: classes, numbers, sets, or auto. With auto, a matrix of 0 and 1 has sets, other floats
            are numbers, and everything else are classes. Floats without fractions may be both, so auto refuses them.
        label_names: names of the columns of y [N, k].
        time: [N] dates or numbers, so that the last samples of each client become its test samples; or None.
    """
    name, tokens = text(name, "name"), truth(tokens, "tokens")
    if classes is not None:
        classes = whole_number(classes, f"{name}: classes", 1, _MOST_CLASSES)
    images = inputs(x, name, tokens=tokens)
    kind = kind_of_labels(y, name, labels)
    if kind != "classes":
        found, class_names = other_labels(y, kind, name, whole=True), tuple(label_names)
        if classes:
            raise PefllError(
                f"{name}: labels are {kind}, so there is no number of classes; leave out classes={classes}",
                code="PEFLL-D503",
            )
        classes = 0
    else:
        found, class_names = _labels(y, name, floats=labels == "classes")
    if classes is None:
        classes = len(class_names) or int(found.max(initial=0)) + 1
        if classes > max(_MANY_CLASSES, len(found)):
            raise PefllError(
                f"{name}: there is a label {classes - 1:,} among {counted(len(found), 'sample')}; number the classes "
                f"from 0 without gaps, or say that labels are numbers, with "
                f"{for_numbers()}",
                code="PEFLL-D101",
            )
    elif kind == "classes" and classes < len(class_names):
        raise PefllError(
            f"{name}: classes is {classes!r}, but y has {len(class_names)} classes; give at least that number",
            code="PEFLL-D102",
        )
    owner, client_names, client_keys = (None, (), None) if client is None else _clients(client, name)
    return Samples(
        x=images,
        y=found,
        classes=classes,
        split=None if split is None else _splits(split, name),
        client=owner,
        name=name,
        class_names=class_names if len(class_names) == classes or kind != "classes" else (),
        client_names=client_names,
        client_keys=client_keys,
        tokens=tokens,
        feature_names=tuple(text(each, "a feature name") for each in listed(feature_names, "feature_names", "['age']")),
        time=None if time is None else order_of(as_array(time, "time", name), "time", name),
    )


def order_of(values: Array, what: str, where: str) -> Array:
    """Return times [N], given as dates or numbers, as float64 [N]; PefllError for missing times."""
    if values.ndim != 1:
        raise PefllError(
            f"{where}: {what} must have one entry per sample, but its shape is {list(values.shape)}", code="PEFLL-D110"
        )
    is_number = values.dtype.kind in "uif"
    times = read_column(values, what, where, rule=NUMBER if is_number else DATE)[1]
    if np.isnan(times).any():
        raise PefllError(
            f"{where}: column {what!r} has no time in row {int(np.isnan(times).argmax()) + 1:,}, so its client's rows "
            "have no order; fill it in, or leave the row out",
            code="PEFLL-D595",
        )
    return times


def inputs(x: Any, name: str = "arrays", *, tokens: bool = False) -> Array:
    """Return a user's inputs x [N, ...] in the shape and type in which `Samples` stores them.

    Images may be channels-first [N, C, H, W], channels-last [N, H, W, 3] or [N, H, W, 1], or grey [N, H, W]. The
    result is channels-first. If the second axis has length 1 or 3, x counts as channels-first. uint8 stays uint8.
    Tokens keep their shape and become int64, unless they are uint8. All other inputs become float32.
    """
    array = as_array(x, "x", name)
    if array.dtype.kind not in "uif":
        kind = "made of texts or other objects" if array.dtype.kind in "OUS" else array.dtype
        raise PefllError(
            f"{name}: x is {kind}; it must hold numbers (uint8 pixels, float features or tokens)", code="PEFLL-D103"
        )
    if array.ndim < 2:
        raise PefllError(
            f"{name}: x must have one row per sample, but its shape is {list(array.shape)}", code="PEFLL-D104"
        )
    if 0 in array.shape[1:]:
        raise PefllError(
            f"{name}: a sample of x has no values, its shape is {list(array.shape[1:])}", code="PEFLL-D105"
        )
    if tokens:
        if array.dtype.kind == "f":
            raise PefllError(f"{name}: x is {array.dtype}; tokens must be whole numbers", code="PEFLL-D106")
        if len(array) and int(array.min()) < 0:
            raise PefllError(f"{name}: there is a negative token; tokens must be 0 or more", code="PEFLL-D107")
        return array if array.dtype == np.uint8 else array.astype(np.int64)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        array = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    if array.dtype == np.uint8:
        return array
    # A value beyond float32 becomes infinite; `check_samples` reports it.
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def kind_of_labels(y: Any, name: str = "arrays", labels: str = "auto") -> str:
    """Return what labels are: classes, numbers or sets; PefllError if `labels` is "auto" and they may be several."""
    if text(labels, "labels", "numbers") not in LABELS:
        raise unknown("kind of labels", labels, LABELS)
    if labels != "auto":
        return labels
    array = _unboxed(as_array(y, "y", name))
    if array.ndim == 2 and array.shape[1] and array.dtype.kind in "bui" and ((array == 0) | (array == 1)).all():
        return "sets"
    if array.dtype.kind in "OU" and array.size and all(isinstance(one, str) and has_commas(one) for one in array.flat):
        raise PefllError(
            f"{name}: labels are texts such as {array.flat[0]!r}; write numbers with a point, as 3.5, or add "
            f"{for_classes()} if they are names of classes",
            code="PEFLL-D616",
        )
    if array.dtype.kind in "OU" and array.ndim == 1:
        _check_class_names(array, name)
    known = array[np.isfinite(array)] if array.dtype.kind == "f" else np.zeros(0)
    if not known.size:
        return "classes"  # or nothing at all, which the check of classes says
    if array.ndim == 1 and (np.floor(known) == known).all():
        if known.size < array.size:
            return "classes"  # some are missing, which the check of classes says
        raise PefllError(
            f"{name}: labels are {array.dtype} without fractions; for classes {_as_whole()} or add {for_classes()}, "
            f"for numbers add {for_numbers()}",
            code="PEFLL-D113",
        )
    # A column of 1.0 and 2.0, or a matrix of 0.0 and 1.0, is not a regression without a word.
    column = array.shape[1:] == (1,) and bool((np.floor(array) == array).all())
    if column or (array.ndim == 2 and ((array == 0) | (array == 1)).all()):
        raise PefllError(
            f"{name}: labels are {described(array)} without fractions; {advice(array, 'classes')}", code="PEFLL-D113"
        )
    return "numbers"


def _check_class_names(labels: Array, name: str) -> None:
    """Raise PefllError for texts [N] that are hardly names of classes: numbers, dates, or nearly all different."""
    there = [one for one in labels.tolist() if not is_missing(one)]
    if not there or not all(isinstance(one, str) for one in there):
        return
    different = list(dict.fromkeys(there))
    if all(map(is_number, different)) and not all(float(one).is_integer() for one in different):
        raise PefllError(
            f"{name}: labels are numbers that are stored as texts, such as {different[0]!r}; save them as numbers, or "
            f"add {for_classes()} if they are names of classes",
            code="PEFLL-D677",
        )
    found = ""
    if all(map(is_date, different)):
        found = f"dates such as {different[0]!r}"
    elif len(there) >= _FEW_LABELS and 2 * len(different) > len(there):
        found = f"{len(different):,} different texts in {counted(len(there), 'row')}, such as {different[0][:40]!r}"
    if found:
        raise PefllError(
            f"{name}: labels are {found}; name the right column, or add {for_classes()} if they are names of classes",
            code="PEFLL-D678",
        )


def _as_whole() -> str:
    return either("save them as whole numbers, 1 and not 1.0", "convert them with y.astype(int)")


def other_labels(y: Any, kind: str, name: str = "arrays", whole: bool = False) -> Array:
    """Return labels that are numbers, float32 [N] or [N, k], or sets, int64 [N, k]; `check_samples` checks values.

    `whole` says whether these are the labels of all clients, whose differences must not be lost by rounding.
    """
    array = _unboxed(as_array(y, "label", name))
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat):
        # A column of a data frame; the advice for texts applies. Their beginnings show whether they are numbers, and
        # NumPy would take the memory of the longest one for each.
        array = np.array([value[:32] for value in array.flat], dtype=str).reshape(array.shape)
    if array.dtype.kind not in "buif" or array.ndim not in (1, 2):
        raise PefllError(
            f"{name}: labels are {described(array)}, not {kind}; {advice(array, kind, chooses=whole)}",
            code="PEFLL-D504",
        )
    if kind == "numbers":
        with np.errstate(over="ignore"):
            array = array[:, 0] if array.shape[1:] == (1,) else array
            return _float32(array, name) if whole else array.astype(np.float32, copy=False)
    if not ((array == 0) | (array == 1)).all():
        odd = array[(array != 0) & (array != 1)].flat[0]
        raise PefllError(
            f"{name}: labels are sets, so they must be 0 or 1, but there is {odd}; {advice(array, kind, whole)}",
            code="PEFLL-D505",
        )
    return array.reshape(len(array), -1).astype(np.int64)


def _float32(labels: Array, name: str) -> Array:
    """Return labels that are numbers as float32; PefllError if their differences are too small for that."""
    rounded, exact = labels.astype(np.float32, copy=False), labels.astype(np.float64, copy=False)
    if labels.dtype == np.float32 or not np.isfinite(exact).all() or not np.isfinite(rounded).all():
        return rounded  # `check_samples` reports values that are not finite
    lost, spread = np.abs(exact - rounded).max(initial=0.0), exact.std(axis=0).max(initial=0.0)
    if lost > 1e-3 * spread > 0:
        raise PefllError(
            f"{name}: labels near {exact.flat[0]:.7g} differ by about {spread:.3g} only, which float32 rounds away; "
            "subtract a constant from them, such as their mean",
            code="PEFLL-D588",
        )
    return rounded


def blank_labels(kind: str, samples: int, columns: int | None = None) -> Array:
    """Return made-up labels of a kind, zeros [samples], or [samples, columns]; for sets, there is at least a column."""
    shape = (samples,) if columns is None and kind != "sets" else (samples, columns or 1)
    return np.zeros(shape, dtype=np.float32 if kind == "numbers" else np.int64)


def labels_of(y: Any, class_names: Iterable[str], name: str = "arrays", labels: str = "classes") -> Array:
    """Return the labels y [N] of a new client as class numbers of an existing federation, int64 [N].

    Labels that are texts, or True and False, must be among `class_names`, the federation's. If these are empty, classes
    are numbers, and False is 0. If they are False and True, 0 and 1 are allowed, too. If the federation's `labels` are
    numbers or sets, return those; see `Samples`.
    """
    if labels != "classes":
        return other_labels(y, labels, name)
    numbered, own = _labels(y, name, chooses=False)
    if not own:
        return numbered
    place = {known: number for number, known in enumerate(class_names)}
    if not place and own == BOOLEANS:
        return numbered
    names = list(place)
    if tuple(names) == BOOLEANS:
        place |= {"0": 0, "1": 1}
    if not place and all(word.isdecimal() for word in own):
        numbers = np.asarray([int(word) for word in own], dtype=object)
        _check_int64(numbers, "label", name)
        return numbers.astype(np.int64)[numbered]
    strange = [own[number] for number in np.unique(numbered).tolist() if own[number] not in place]
    if strange:
        known = first_few(names, 20) if names else "whole numbers"
        raise PefllError(
            f"{name}: there is a class {strange[0]!r}, but the model's classes are {known}; write the labels as in the "
            "training data",
            code="PEFLL-D108",
        )
    return np.asarray([place.get(word, -1) for word in own], dtype=np.int64)[numbered]


def owners_of(client: Any, name: str = "arrays") -> tuple[Array, tuple[int | str, ...]]:
    """Return each sample's client as an index, int64 [N], and the sorted names or numbers that it indexes."""
    owner, names, keys = _clients(client, name)
    if names:
        return owner, names
    return owner, tuple(range(int(owner.max(initial=-1)) + 1) if keys is None else keys.tolist())


def as_array(values: Any, what: str, name: str) -> Array:
    """Return a user's array, list or tensor as a NumPy array; errors use `what` and `name`."""
    if isinstance(values, torch.utils.data.Dataset | torch.utils.data.DataLoader):
        raise PefllError(
            f"{name}: {what} is {shown(values)} of torch; give arrays or tensors, for example dataset.data and "
            "dataset.targets, or torch.stack([x for x, y in dataset])",
            code="PEFLL-A021",
        )
    if values is None or isinstance(values, dict | str | bytes):
        raise PefllError(
            f"{name}: {what} is {shown(values)}; give an array, a list or a tensor, with an entry for each sample",
            code="PEFLL-A022",
        )
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise PefllError(f"{name}: {what} has masked entries; fill them or leave these samples out", "PEFLL-D007")
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError, OverflowError, NotImplementedError, MemoryError) as error:
        raise PefllError(
            f"{name}: {what} cannot be made into one array; do its entries differ in shape? {first_line(error)}",
            code="PEFLL-D109",
        ) from None


def _unboxed(array: Array) -> Array:
    """Return an array of Python objects that are all True or False, or all floats, as an array of that type."""
    if array.dtype.kind == "O" and array.size:
        if all(isinstance(value, bool | np.bool_) for value in array.flat):
            return array.astype(bool)
        if all(type(value) is float and not is_missing(value) for value in array.flat):
            return array.astype(float)
    return array


def _column(values: Any, what: str, name: str, *, floats: bool = True, chooses: bool = True) -> Array:
    """Return values as int64 [N], or texts as dtype object [N].

    Args:
        values: labels, or the client or split of each sample.
        what: what they are.
        name: name of the data.
        floats: whether floats that are whole numbers are allowed.
        chooses: whether labels may be other than classes, see `label_advice.advice`.
    """
    array = _unboxed(as_array(values, what, name))
    if array.ndim != 1:
        what_to_do = advice(array, "classes", chooses) if what == "label" else "give one column"
        raise PefllError(
            f"{name}: {what} must have one entry per sample, but its shape is {list(array.shape)}; {what_to_do}",
            code="PEFLL-D110",
        )
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8", "replace")
    if array.dtype.kind == "U":
        # A list is converted again, to objects: NumPy silently turned the numbers of a mixed list into texts.
        array = np.asarray(values if isinstance(values, list | tuple) else array, dtype=object)
    if array.dtype.kind == "O":
        if all(isinstance(value, str) for value in array):
            _check_names(array, what, name)
            return array
        if all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in array):
            _check_int64(array, what, name)
            return array.astype(np.int64)
        kind = type(array[0])
        odd = next((place for place, value in enumerate(array) if type(value) is not kind or is_missing(value)), 0)
        raise PefllError(
            f"{name}: {what} mixes types or has empty entries, such as {shown(array[odd])} in row {odd + 1:,}; it must "
            "be all whole numbers or all texts",
            code="PEFLL-D111",
        )
    if array.dtype.kind == "f":
        check_whole(array, what, name, chooses=chooses and what == "label")
        if not floats:
            raise PefllError(
                f"{name}: {what}s are {array.dtype}; for classes {_as_whole()}",
                code="PEFLL-D113",
            )
    elif array.dtype.kind not in "ui":
        raise PefllError(f"{name}: {what} is {array.dtype}; it must hold whole numbers or texts", code="PEFLL-D114")
    _check_int64(array, what, name)
    return array.astype(np.int64, copy=False)


def check_whole(array: Array, what: str, name: str, among: Any = True, *, chooses: bool = False) -> None:
    """Raise PefllError for floats [N] of which some are no whole numbers; only those in `among` [N] count.

    With `chooses`, the floats are labels, which may be numbers instead of classes.
    """
    bad = ((np.floor(array) != array) | ~np.isfinite(array)) & among
    if bad.any():
        place = int(bad.argmax())
        or_numbers = many_numbers(array) if chooses else ""
        raise PefllError(
            f"{name}: {what} {array[place]} of sample {place} is not a whole number; correct it or leave the sample "
            f"out{or_numbers}",
            code="PEFLL-D112",
        )


def _check_int64(array: Array, what: str, name: str) -> None:
    """Raise PefllError for a whole number that int64 cannot hold."""
    if array.dtype.kind == "i" or not len(array):
        return
    low, high = int(array.min()), int(array.max())
    if low < -(1 << 63) or high >= 1 << 63:
        far = high if high >= 1 << 63 else low
        raise PefllError(
            f"{name}: there is a {what} that is {shown(far)}; number them from 0, or give them as texts", "PEFLL-D008"
        )


def _check_names(texts: Array, what: str, name: str) -> None:
    """Raise PefllError for a text that is too long for a name, and for labels that differ by spaces only."""
    longest = max((len(each) for each in texts), default=0)
    if longest > _LONG_NAME:
        raise PefllError(
            f"{name}: there is a {what} of {longest:,} characters, but at most {_LONG_NAME:,} are allowed; is this "
            "the right column?",
            code="PEFLL-D009",
        )
    different: dict[str, str] = {}
    for word in dict.fromkeys(texts.tolist()) if what == "label" else ():
        if (other := different.setdefault(word.strip(), word)) != word:
            raise PefllError(
                f"{name}: there are labels {other!r} and {word!r}, which differ by spaces only; write them alike",
                code="PEFLL-D675",
            )


def _number_texts(texts: Array) -> tuple[Array, tuple[str, ...]]:
    """Return the number of each text, int64 [N], and the sorted unique texts, which these numbers index."""
    different = set(texts.tolist())
    # If all texts are numbers, "10" comes after "9".
    by_value = all(word.isdecimal() for word in different)
    names = tuple(sorted(different, key=lambda word: (int(word), word) if by_value else (0, word)))
    place = {word: number for number, word in enumerate(names)}
    return np.fromiter((place[word] for word in texts), dtype=np.int64, count=len(texts)), names


def _labels(y: Any, name: str, *, floats: bool = False, chooses: bool = True) -> tuple[Array, tuple[str, ...]]:
    """Return the class of each label, int64 [N], and the classes' names; whole numbers have none."""
    truths = _unboxed(as_array(y, "label", name))
    if truths.dtype.kind == "b" and truths.ndim == 1:
        return truths.astype(np.int64), BOOLEANS
    column = _column(y, "label", name, floats=floats, chooses=chooses)
    return _number_texts(column) if column.dtype == object else (column, ())


def _clients(client: Any, name: str) -> tuple[Array, tuple[str, ...], Array | None]:
    """Return each sample's client 0..n-1, int64 [N], the clients' names, and their numbers if these are not 0..n-1."""
    keys = _column(client, "client", name)
    if keys.dtype == object:
        return (*_number_texts(keys), None)
    if len(keys) == 0:
        return keys, (), None
    low, high = int(keys.min()), int(keys.max())
    if high - low > 4 * len(keys) + 1024:
        different, place = np.unique(keys, return_inverse=True)
        return place.reshape(-1), (), different
    # If the numbers have no wide gaps, a table of all numbers is faster than sorting.
    present = np.bincount(keys - low) > 0
    if low == 0 and present.all():
        return keys, (), None
    return (np.cumsum(present) - 1)[keys - low], (), np.flatnonzero(present) + low


def _splits(split: Any, name: str) -> Array:
    column = _column(split, "split", name)
    if column.dtype == object:
        numbers, words = _number_texts(column)
        strange = [word for word in words if word.lower() not in _SPLIT_WORDS]
        if strange:
            raise PefllError(
                f"{name}: there is a split {strange[0]!r}; splits are {', '.join(SPLITS)}", code="PEFLL-D115"
            )
        return np.asarray([_SPLIT_WORDS[word.lower()] for word in words], dtype=np.int8)[numbers]
    if len(column) and not 0 <= int(column.min()) <= int(column.max()) <= TEST:
        raise PefllError(f"{name}: splits must be 0 (train), 1 (validation) or 2 (test)", code="PEFLL-D116")
    return column.astype(np.int8)
