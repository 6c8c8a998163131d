"""What a reply looks like, found by doing the task once on a made-up client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pefll.core.tree import Tree, leaves, map_tree
from pefll.data.client import Client
from pefll.data.federation import Samples, assemble
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.methods.contract import Each, Everyone


class ReplyForms:
    """Remembers what replies look like.

    Args:
        agreement: says what samples look like.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._forms: dict[object, Tree] = {}

    def form_of_reply(
        self, task: Callable[..., Tree], arguments: Sequence[Everyone | Each], static: dict[str, int]
    ) -> Tree:
        """Return what one client's reply to a task looks like: the task is rehearsed once, on a made-up client."""
        zeros = [
            map_tree(
                lambda leaf, argument=argument: torch.zeros_like(leaf[0] if isinstance(argument, Each) else leaf),
                argument.value,
            )
            for argument in arguments
        ]
        shapes = tuple((leaf.shape, leaf.dtype) for tree in zeros for leaf in leaves(tree))
        key = (task.__name__, tuple(sorted(static.items())), shapes)
        if key not in self._forms:
            self._forms[key] = task(self._made_up(), *zeros, **static)
        return self._forms[key]

    def _made_up(self) -> Client:
        agreed = self._agreement
        kind = np.int64 if agreed.tokens else np.uint8 if agreed.normalise else np.float32
        samples = Samples(
            x=np.zeros((2, *agreed.input_shape), dtype=kind),
            y=np.zeros(2, dtype=np.int64),
            classes=agreed.classes,
            normalise=agreed.normalise,
            tokens=agreed.tokens,
        )
        zeros = np.zeros(2, dtype=np.int64)
        made_up = assemble(samples, zeros, zeros.astype(np.int8), 1, "made up")
        return Client(
            federation=made_up,
            seed=0,
            id=torch.tensor(0),
            round=torch.tensor(0),
            offset=made_up.offset[:, 0],
            count=made_up.count[:, 0],
            capacity=(2, 0, 0),
            dtype=agreed.dtype,
        )
