"""Counts floating point operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating point operations of a `with` block, in the thread of the block only.

    torch's counter also counts per module, with hooks on every module of the process. So it would count the operations
    of other threads too. It also imports torch's compiler, which takes more than a second.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and add its floating point operations to `total`."""
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            with self:  # a compound operation is counted by its parts
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if count is not None:
            self.total += int(count(*args, **kwargs, out_val=out))
        return out
