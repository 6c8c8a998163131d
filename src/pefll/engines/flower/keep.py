"""What a client keeps to itself: on its own disk, one small file for each time it kept something.

The server never sees it. In the server's state, where a simulation has the client's row, there stands a ticket: a row
filled with one number that says when the client kept it. So a run that goes on from a checkpoint, or is tested at its
best round, asks each client for what it had at that time, and not for what it has now.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, write_whole

# Numbers that no weight ever has, all of them exact in float32: -(2^20) downwards for rounds of training, and
# -(2^23) downwards for what is kept only until an evaluation is over.
_TRAINING, _PASSING = 1 << 20, 1 << 23
EXCHANGES = LEAVES = 4  # so many exchanges of a round may keep something, and each so many tensors
_NAME = re.compile(r"(round|visit)-[0-9a-f]+-[0-9]+")


class Ticket(NamedTuple):
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
    def number(self) -> int:
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

    def name(self, visit: str) -> str:
        """What a client calls it."""
        return f"visit-{visit}-{self.exchange}" if self.round < 0 else f"round-{self.round}-{self.exchange}"


def ticket_in(row: Tensor) -> Ticket | None:
    """Return the ticket that a row of the server's state holds; None where it holds values."""
    if row.numel() == 0 or row.dtype == torch.bool:
        return None
    number = -int(row.reshape(-1)[0]) if bool(torch.isfinite(row.reshape(-1)[0])) else 0
    if number < _TRAINING or not bool((row == -number).all()):
        return None
    if number >= _PASSING:
        return Ticket(-1, *divmod(number - _PASSING, LEAVES))
    round_, rest = divmod(number - _TRAINING, EXCHANGES * LEAVES)
    return Ticket(round_, *divmod(rest, LEAVES))


class Store:
    """A client's folder of what it kept.

    Args:
        folder: on the client's disk; made when something is kept for the first time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, leaves: list[Tensor]) -> None:
        """Keep tensors under a name; what earlier visits kept is thrown away."""
        path = self._path(name)
        with sentences_for_disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            if name.startswith("visit-"):
                visit = name.rpartition("-")[0]
                for old in self._folder.glob("visit-*.safetensors"):
                    if not old.name.startswith(f"{visit}-"):
                        old.unlink(missing_ok=True)
        named = {str(place): leaf.detach().contiguous().clone() for place, leaf in enumerate(leaves)}
        write_whole(path, safetensors.torch.save(named))

    def get(self, name: str) -> list[Tensor]:
        """Return what was kept under a name."""
        path = self._path(name)
        try:
            tensors = safetensors.torch.load(path.read_bytes())
        except (OSError, safetensors.SafetensorError):
            raise PefllError(f"{path}, which this client kept, is gone or damaged", code="PEFLL-F440") from None
        # Cloned, because numbers at odd addresses would be rounded differently.
        return [tensors[str(place)].clone() for place in range(len(tensors))]

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):  # it comes from the network and becomes a file's name
            raise PefllError("the server asked for something that no client keeps", code="PEFLL-F441")
        return self._folder / f"{name}.safetensors"
