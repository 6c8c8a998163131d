"""FEMNIST from LEAF's JSON files: handwritten characters. Each client is a writer."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

from pefll.core.errors import PefllError
from pefll.data import leaf
from pefll.data.samples import Array, Normalise, Samples

_SIDE, _PADDED = 28, 32
_PAPER = 255  # white, the colour of the padding: LEAF's images are black on white
CLASS_NAMES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def load(data_dir: Path) -> Samples:
    """Return FEMNIST from `femnist/{train,test}/*.json`, padded to 32x32.

    x is uint8 [N, 1, 32, 32]; networks get it as values in [0, 1]. There are 62 classes, and the split is LEAF's.
    """
    folder = data_dir / "femnist"
    clients: dict[str, int] = {}
    images: list[Array] = []
    labels: list[Array] = []
    sizes, owners, splits = [], [], []
    for user in leaf.users(folder):
        images.append(_pixels(user))
        labels.append(_labels(user))
        sizes.append(len(user.y))
        owners.append(clients.setdefault(user.name, len(clients)))
        splits.append(user.split)
    if not images:
        raise PefllError(
            f"femnist: there are no LEAF shards in {folder}/train; see `pefll data get femnist`", code="PEFLL-D148"
        )
    return Samples(
        x=_pad(images, sum(sizes)),
        y=np.concatenate(labels),
        classes=len(CLASS_NAMES),
        split=np.repeat(np.asarray(splits, dtype=np.int8), sizes),
        client=np.repeat(np.asarray(owners, dtype=np.int64), sizes),
        # LEAF's values are bytes divided by 255. Mean 0 and deviation 1 give networks the same values.
        normalise=Normalise((0.0,), (1.0,)),
        name="femnist",
        class_names=CLASS_NAMES,
        client_names=tuple(clients),
    )


def _pixels(user: leaf.User) -> Array:
    """Return a user's images, uint8 [n, 28, 28]."""
    try:
        x = np.asarray(user.x, dtype=np.float32).reshape(-1, _SIDE, _SIDE)
    except (ValueError, TypeError, OverflowError):
        x = np.empty((0, _SIDE, _SIDE), dtype=np.float32)
    if len(x) != len(user.x):
        raise PefllError(
            f"{user.where} is damaged: images of user {user.name!r} do not have 784 numbers each", code="PEFLL-D149"
        )
    if not ((x >= 0) & (x <= 1)).all():  # also for NaN
        raise PefllError(
            f"{user.where} is damaged: pixels of user {user.name!r} are not within 0..1", code="PEFLL-D150"
        )
    return np.round(x * 255).astype(np.uint8)


def _labels(user: leaf.User) -> Array:
    """Return a user's labels, int64 [n]."""
    if not all(type(label) is int and 0 <= label < len(CLASS_NAMES) for label in user.y):
        raise PefllError(
            f"{user.where} is damaged: labels of user {user.name!r} are not whole numbers 0..61", code="PEFLL-D151"
        )
    return np.asarray(user.y, dtype=np.int64)


def _pad(images: list[Array], total: int) -> Array:
    """Return images [n, 28, 28] padded in one array [total, 1, 32, 32]; empty the list to save memory."""
    padded = np.empty((total, 1, _PADDED, _PADDED), dtype=np.uint8)
    border = (_PADDED - _SIDE) // 2
    inside = slice(border, border + _SIDE)
    images.reverse()
    start = 0
    while images:
        part = images.pop()
        block = padded[start : start + len(part), 0]
        block[...] = _PAPER
        block[:, inside, inside] = part
        start += len(part)
    return padded
