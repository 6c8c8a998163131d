"""The base class of methods whose clients train with SGD: its hyper-parameters, and the limit of what clients keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pefll.methods.contract import BaseMethod, check_kept, require
from pefll.methods.optim import SGD


@dataclass(frozen=True)
class LocalSGD(BaseMethod):
    """A method whose clients train with SGD.

    Attributes:
        batch_size: samples per step of a client.
        client_lr: learning rate of local SGD.
        client_momentum: momentum of local SGD.
        client_clip: maximum norm of a local gradient; 0 for no clipping.
        weight_decay: weight decay of local SGD.
    """

    batch_size: int = 32
    client_lr: float = 1e-2
    client_momentum: float = 0.9
    client_clip: float = 50.0
    weight_decay: float = 5e-5

    client_rates: ClassVar[tuple[str, ...]] = ("client_lr",)

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}; it must be at least 1", code="PEFLL-S008")

    def check(self) -> None:
        """Raise PefllError if what clients keep does not fit into memory."""
        advice = "take fewer clients, a smaller model, or a method whose clients keep less"
        check_kept(self.problem.num_clients, self.kept_size, advice)

    @property
    def kept_size(self) -> int:
        """Number of numbers that a client keeps between rounds."""
        return 0

    def sgd(self, lr: float | Tensor) -> SGD:
        """Return a client's optimiser with the learning rate `lr`."""
        return SGD(lr, self.client_momentum, self.weight_decay, self.client_clip or None)
