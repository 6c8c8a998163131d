"""MNIST's 70,000 digits with their writers. Each client is a writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.npz import read_npz
from pefll.data.samples import Normalise, Samples

FILE = Path("mnist_writers") / "mnist_by_writer.npz"
# The usual channel statistics, computed from the 60,000 training images.
NORMALISE = Normalise((0.1307,), (0.3081,))


def load(data_dir: Path) -> Samples:
    """Return the digits of all writers, uint8 [N, 1, 28, 28], 10 classes, without a split.

    MNIST's own split puts each writer either in train or in test. So the partition splits each writer's samples again.
    """
    path = data_dir / FILE
    if not path.is_file():
        raise PefllError(f"mnist_writers: there is no {path}; see `pefll data get mnist_writers`", code="PEFLL-D169")
    arrays = read_npz(path, needed=("images", "labels", "writer_id"))
    images, labels, writer = arrays["images"], arrays["labels"], arrays["writer_id"]
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (28, 28):
        raise PefllError(
            f"{path}: images must be uint8 [n, 28, 28], but are {images.dtype} {list(images.shape)}", code="PEFLL-D170"
        )
    if not np.issubdtype(writer.dtype, np.integer) or writer.shape != images.shape[:1]:
        raise PefllError(f"{path}: writer_id must have one whole number per image", code="PEFLL-D171")
    if not np.issubdtype(labels.dtype, np.integer):
        raise PefllError(f"{path}: labels must be whole numbers 0..9", code="PEFLL-D172")
    names, client = np.unique(writer, return_inverse=True)
    return Samples(
        x=images[:, None],
        y=labels.astype(np.int64),
        classes=10,
        client=client.reshape(-1).astype(np.int64),
        normalise=NORMALISE,
        name="mnist_writers",
        client_names=tuple(str(name) for name in names.tolist()),
    )


def found(data_dir: Path) -> list[Path]:
    """Return the files that `load` would read."""
    path = data_dir / FILE
    return [path] if path.is_file() else []
