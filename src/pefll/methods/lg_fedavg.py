"""LG-FedAvg: Think Locally, Act Globally: Federated Learning with Local and Global Representations.

Liang et al., 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pefll.methods.partly_shared import PartlyShared
from pefll.models.head import HeadFirst, NoHead, Parts, head_of


@dataclass(frozen=True)
class LGFedAvg(PartlyShared):
    """Clients share the head of a model; each client has its own representation, the layers before the head.

    Attributes:
        shared: auto for the model's last linear layer, all (FedAvg), none (local training), or the name of a layer.
    """

    shared: str = "auto"

    @cached_property
    def parts(self) -> Parts:
        """The object that splits a model into the shared head and the client's own layers."""
        model = self.problem.model
        return NoHead(model) if self.shared == "all" else HeadFirst(model, head_of(model, self.shared))
