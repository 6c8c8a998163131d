"""scikit-learn's 1,797 handwritten digits of 8x8 pixels: they come with the package, so no file is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pefll.data.federation import Samples


def load(data_dir: Path) -> Samples:
    """Return the digits.

    Args:
        data_dir: not read; every data set is loaded by the same call.

    Returns:
        x uint8 [1797, 1, 8, 8], 10 classes; nobody's, and not split. They come without channel statistics: these are
        measured on seen clients' training samples once there are clients.
    """
    from sklearn.datasets import load_digits  # here, because importing it takes longer than most commands do

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return Samples(
        x=pixels[:, None],
        y=digits.target.astype(np.int64),
        classes=10,
        name="digits",
        class_names=tuple("0123456789"),
    )
