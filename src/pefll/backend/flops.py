"""Counting floating point operations."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import FlopCounterMode


class FlopCounter(FlopCounterMode):
    """Counts the operations of a block, in the thread that it runs in.

    torch's own also tells modules apart, and for that hooks into every module of the process: into those of other
    threads too, which would then write to its lists.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _OneModule()


class _OneModule:
    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return
