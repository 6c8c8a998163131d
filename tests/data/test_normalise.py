"""Images of another scale than the training's are noticed, and unusual photographs are not."""

from __future__ import annotations

import numpy as np
import pytest

from pefll.data.normalise import other_scale
from pefll.data.samples import Normalise

RNG = np.random.default_rng(0)
PHOTOS = RNG.integers(0, 256, (20, 3, 8, 8)).astype(np.uint8)
USUAL = Normalise((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
OPAQUE = np.concatenate([PHOTOS, np.full((20, 1, 8, 8), 255, np.uint8)], axis=1)


@pytest.mark.parametrize(
    ("x", "normalise", "is_other"),
    [
        (PHOTOS, USUAL, False),
        (PHOTOS // 16, USUAL, True),
        (PHOTOS // 255, USUAL, True),
        (PHOTOS // 3, USUAL, False),  # a dark place
        (200 + PHOTOS // 32, USUAL, False),  # the sky
        (np.zeros_like(PHOTOS), USUAL, False),
        (PHOTOS, Normalise((0.03,) * 3, (0.02,) * 3), True),  # training had the small scale
        (OPAQUE // 16, Normalise((*USUAL.mean, 1.0), (*USUAL.std, 1.0)), True),
        (OPAQUE, Normalise((*USUAL.mean, 1.0), (*USUAL.std, 1.0)), False),
    ],
)
def test_the_scale_of_images(x, normalise, is_other):
    assert bool(other_scale(x, normalise)) == is_other
