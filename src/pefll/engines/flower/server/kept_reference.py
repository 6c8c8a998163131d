"""References in the server's state to tensors that clients keep on their own disks.

In a simulation the state has a row of values for each client. Here every value of the row is the same number, which
says when the client kept its values. So a resumed run, or a test of the best round, uses the values that a client had
at that time, and not the latest ones.

The references are numbers, because a method's state is a tree of tensors with fixed shapes. Methods, checkpoints and
the choice of the best round copy its rows. References of another type would change all three, and runs of this version
could not be resumed. The numbers never leave the server. A message calls a kept tensor by a name, such as
`round-3-0:1`. A client uses the tensor only where its method allows it (`check_kept_arguments`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pefll.core.errors import PefllError

# Weights never have such large negative values, and float32 has these numbers exactly. From -(2^20) down: tensors of
# training rounds. From -(2^23) down: tensors that are kept only until an evaluation ends.
_TRAINING, _EVALUATION = 1 << 20, 1 << 23
EXCHANGES = LEAVES = 4  # tensors can be kept in at most 4 exchanges of a round, and at most 4 in each exchange


class KeptReference(NamedTuple):
    """A tensor that a client keeps, named by the time when the client stored it.

    Attributes:
        round: number of the training round; -1 for a tensor that is kept only until an evaluation ends.
        exchange: number of the exchange in the round or evaluation.
        leaf: index among the tensors that the client kept in this exchange.
    """

    round: int
    exchange: int
    leaf: int = 0

    @property
    def value(self) -> int:
        """The number that represents this reference in the server's state."""
        number = self.exchange * LEAVES + self.leaf
        if self.leaf >= LEAVES or (self.round >= 0 and self.exchange >= EXCHANGES):
            raise PefllError(
                "clients can keep at most 4 tensors in each of the first 4 exchanges of a round", code="PEFLL-F438"
            )
        if self.round < 0:
            return -(_EVALUATION + number)
        number += _TRAINING + EXCHANGES * LEAVES * self.round
        if number >= _EVALUATION:
            raise PefllError("clients that keep tensors can take part in at most 450,000 rounds", code="PEFLL-F439")
        return -number

    def store_name(self, cache: str) -> str:
        """Return the name under which a client stores the tensors of this exchange."""
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
