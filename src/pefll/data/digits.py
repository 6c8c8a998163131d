"""scikit-learn's 1,797 handwritten digits of 8x8 pixels, which need no file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pefll.data.samples import Samples


def load(data_dir: Path) -> Samples:
    """Return the digits, uint8 [1797, 1, 8, 8], 10 classes, without clients, split or channel statistics.

    `data_dir` is not read. It is an argument because all data sets have this signature.
    """
    from sklearn.datasets import load_digits  # slow to import

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return Samples(
        x=pixels[:, None],
        y=digits.target.astype(np.int64),
        classes=10,
        name="digits",
    )
