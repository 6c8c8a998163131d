"""Our engines on an LSTM, with its layers computed in one of several ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from benchmarks.speed import ours
from benchmarks.speed.setting import Work
from pefll.core import reference
from pefll.models.lstm import lstm_layer

WAYS = {
    "fused": "all time steps in one launch, if they fit",
    "steps": "one launch per time step",
    "plain": "the reference, mapped by torch",
}


def run(work: Work, turns: Iterable[int], way: str = "fused", **options: Any) -> Tensor | None:
    """Run rounds on one of our engines, with LSTM layers computed as a key of WAYS says."""
    choose(way)
    return ours.run(work, turns, **options)


def choose(way: str) -> None:
    """Choose for this process how LSTM layers are computed; after "plain" there is no way back."""
    if way == "plain":
        reference._versions[lstm_layer].clear()
        return
    from pefll.backend.kernels import lstm

    lstm.persistent = way == "fused"
