"""References in the server's state to what clients keep on their own disks.

Where a simulation has a client's row, there stands a ticket: a row filled with one number that says when the client
kept it. So a run that goes on from a checkpoint, or is tested at its best round, asks each client for what it had at
that time, and not for what it has now.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pefll.core.errors import PefllError

# Numbers that no weight ever has, all of them exact in float32: -(2^20) downwards for rounds of training, and
# -(2^23) downwards for what is kept only until an evaluation is over.
_TRAINING, _PASSING = 1 << 20, 1 << 23
EXCHANGES = LEAVES = 4  # so many exchanges of a round may keep something, and each so many tensors


class KeptReference(NamedTuple):
    """When a client kept something.

    Attributes:
        round: of training; -1 for what is kept only for the visit under way.
        exchange: of the round or visit.
        leaf: which of the tensors that were kept then.
    """

    round: int
    exchange: int
    leaf: int = 0

    @property
    def value(self) -> int:
        """What stands for it in the server's state."""
        number = self.exchange * LEAVES + self.leaf
        if self.leaf >= LEAVES or (self.round >= 0 and self.exchange >= EXCHANGES):
            raise PefllError(
                "clients can keep 4 tensors in an exchange, in the first 4 exchanges of a round", code="PEFLL-F438"
            )
        if self.round < 0:
            return -(_PASSING + number)
        number += _TRAINING + EXCHANGES * LEAVES * self.round
        if number >= _PASSING:
            raise PefllError("clients that keep something can take part in 450,000 rounds at most", code="PEFLL-F439")
        return -number

    def store_name(self, cache: str) -> str:
        """What a client calls it."""
        return f"visit-{cache}-{self.exchange}" if self.round < 0 else f"round-{self.round}-{self.exchange}"


def reference_in(row: Tensor) -> KeptReference | None:
    """Return the ticket that a row of the server's state holds; None where it holds values."""
    if row.numel() == 0 or row.dtype == torch.bool:
        return None
    number = -int(row.reshape(-1)[0]) if bool(torch.isfinite(row.reshape(-1)[0])) else 0
    if number < _TRAINING or not bool((row == -number).all()):
        return None
    if number >= _PASSING:
        return KeptReference(-1, *divmod(number - _PASSING, LEAVES))
    round_, rest = divmod(number - _TRAINING, EXCHANGES * LEAVES)
    return KeptReference(round_, *divmod(rest, LEAVES))
