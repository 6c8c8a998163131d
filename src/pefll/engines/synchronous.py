"""What engines have in common that are done with a round when they return from it, and queue nothing on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pefll.core.tree import Tree
from pefll.engines.cohort import Ids
from pefll.engines.device_queue import Clock, DeviceFuture


class SynchronousEngine(ABC):
    """Rounds one after another, each done before the next begins; states are never written to.

    Attributes:
        device: where the server's state lies.
    """

    device: torch.device
    queues = False

    @abstractmethod
    def _round(self, server: Tree, t: int) -> Tree:
        """Return the server's state after round t."""

    def launch(self, server: Tree, first: int, rounds: int) -> tuple[Tree, DeviceFuture[None]]:
        """Do rounds first..first+rounds-1 and return the server's state; there is nothing left to wait for."""
        clock = Clock(self.device)
        for t in range(first, first + rounds):
            server = self._round(server, t)
        return server, clock.later(torch.empty(0), lambda _: None)

    def advance(self, server: Tree, first: int, rounds: int) -> Tree:
        """Return the server's state after rounds first..first+rounds-1."""
        return self.launch(server, first, rounds)[0]

    def snapshot(self, server: Tree) -> Tree:
        """Return the state itself: rounds make new ones and do not write to it."""
        return server

    def repeated(self, function: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
        """Return `function` itself."""
        return function

    def turn(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def weighed(self, clients: Ids, sums: Any, chooses: bool) -> Any:
        """Return the sums as they are: simulated clients do not lie about themselves."""
        del clients, chooses
        return sums

    def aside(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()
