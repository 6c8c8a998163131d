"""References in the server's state to what clients keep on their own disks.

In a simulation the state has a row of values for each client. Here the row is filled with one number instead, which
says when the client kept its values. So a resumed run, or a test of the best round, asks each client for what it had
at that time, and not for what it has now.

Why numbers: a method's state is a tree of tensors of fixed shapes, and methods, checkpoints and the choice of the best
round copy rows as they are. A reference of another type would change all of them, and runs of this version could not
be resumed. The numbers never leave the server. Messages name what a client keeps by words, such as `round-3-0:1`, and
a client uses it only where its method allows that (`check_kept_arguments`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pefll.core.errors import PefllError

# Numbers that weights do not reach, all exact in float32: from -(2^20) down for rounds of training, and from -(2^23)
# down for what is kept only until an evaluation ends.
_TRAINING, _EVALUATION = 1 << 20, 1 << 23
EXCHANGES = LEAVES = 4  # the most exchanges of a round that keep something, and the most tensors in each


class KeptReference(NamedTuple):
    """When a client kept a tensor.

    Attributes:
        round: of training; -1 for what is kept only until an evaluation ends.
        exchange: of the round or evaluation.
        leaf: which of the tensors that were kept then.
    """

    round: int
    exchange: int
    leaf: int = 0

    @property
    def value(self) -> int:
        """The number that stands for it in the server's state."""
        number = self.exchange * LEAVES + self.leaf
        if self.leaf >= LEAVES or (self.round >= 0 and self.exchange >= EXCHANGES):
            raise PefllError(
                "clients can keep 4 tensors in an exchange, in the first 4 exchanges of a round", code="PEFLL-F438"
            )
        if self.round < 0:
            return -(_EVALUATION + number)
        number += _TRAINING + EXCHANGES * LEAVES * self.round
        if number >= _EVALUATION:
            raise PefllError("clients that keep something can take part in 450,000 rounds at most", code="PEFLL-F439")
        return -number

    def store_name(self, cache: str) -> str:
        """Return the name under which a client stores it."""
        return f"evaluation-{cache}-{self.exchange}" if self.round < 0 else f"round-{self.round}-{self.exchange}"


def reference_in(row: Tensor) -> KeptReference | None:
    """Return the reference in a row of the server's state; None if the row holds values."""
    if row.numel() == 0 or row.dtype == torch.bool:
        return None
    number = -int(row.reshape(-1)[0]) if bool(torch.isfinite(row.reshape(-1)[0])) else 0
    if number < _TRAINING or not bool((row == -number).all()):
        return None
    if number >= _EVALUATION:
        return KeptReference(-1, *divmod(number - _EVALUATION, LEAVES))
    round_, rest = divmod(number - _TRAINING, EXCHANGES * LEAVES)
    return KeptReference(round_, *divmod(rest, LEAVES))
