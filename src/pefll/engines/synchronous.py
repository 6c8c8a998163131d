"""Base class of engines whose `advance` returns only when its rounds are done."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pefll.core.tree import Tree


class SynchronousEngine(ABC):
    """Runs rounds one after another; never overwrites a server state."""

    @abstractmethod
    def _round(self, server: Tree, t: int) -> Tree:
        """Return the server's state after round t."""

    def advance(self, server: Tree, first: int, rounds: int) -> Tree:
        """Return the server's state after rounds first..first+rounds-1."""
        for t in range(first, first + rounds):
            server = self._round(server, t)
        return server
