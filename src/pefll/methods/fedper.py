"""FedPer: Federated Learning with Personalization Layers (Arivazhagan et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pefll.methods.partly_shared import PartlyShared
from pefll.models.head import Parts, head_of


@dataclass(frozen=True)
class FedPer(PartlyShared):
    """Clients share the base layers of a model; each client has its own personalization layers, the head.

    Base and head are trained together, in the same steps. FedRep trains them one after the other.

    Attributes:
        head: auto for the model's last linear layer, none for no head (FedAvg), or the name of a layer or block.
    """

    head: str = "auto"

    @cached_property
    def parts(self) -> Parts:
        """The object that splits a model into the shared base and the client's own head."""
        return head_of(self.problem.model, self.head)
