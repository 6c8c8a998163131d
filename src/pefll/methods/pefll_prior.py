"""PeFLL with a label prior: not in the paper; it rules out classes that a client does not have.

A client's descriptor also says how often it has each class, and the server adds the logarithm of these shares to the
output bias that it generates: Bayes' rule for a client whose labels are distributed otherwise. A client without labels
says that all classes are equally frequent, which changes nothing in what its model prefers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from pefll.data.client import Client
from pefll.methods.contract import require
from pefll.methods.pefll import PeFLL, Server
from pefll.models.head import Head
from pefll.models.network import Parameters


@dataclass(frozen=True)
class PeFLLPrior(PeFLL):
    """PeFLL whose descriptors [l + C] end with the client's share p of each class.

    Attributes:
        tau: τ: the output bias becomes what the hypernetwork makes of the descriptor, plus τ log(p + ε).
        epsilon: ε: the share that a class is taken to have where there is no sample of it.
        histogram: whether clients tell their shares; if not, nothing of them is sent, and this is PeFLL.
    """

    tau: float = 1.0
    epsilon: float = 1e-3
    histogram: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epsilon != 0, "epsilon is 0; it must be more than 0", code="PEFLL-S011")

    def check(self) -> None:
        """Raise PefllError where the model has no output bias for each class."""
        super().check()
        start, stop = self.bias
        require(
            stop - start == self.problem.classes,
            f"the model's last linear layer has {stop - start} outputs, not one for each class",
            code="PEFLL-S012",
        )

    @cached_property
    def bias(self) -> tuple[int, int]:
        """Where the output bias begins and ends in a model's flat vector."""
        return Head(self.problem.model).bias_place()

    def generate(self, server: Server, eta_h: Parameters, v: Tensor) -> Tensor:
        """θ = h(v; η_h), with τ log(p + ε) added to the output bias: [c, D] from descriptors [c, l + C]."""
        if not self.histogram:
            return super().generate(server, eta_h, v)
        v, p = torch.split(v, [self.descriptor, self.problem.classes], dim=1)
        start, stop = self.bias
        prior = self.tau * (p + self.epsilon).log()
        return super().generate(server, eta_h, v) + F.pad(prior, (start, self.problem.model.size - stop))

    def describe(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v and p, [l + C]."""
        return self.with_shares(client, super().describe(client, eta_v))

    def describe_all(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v over all training samples, and p, [l + C]."""
        return self.with_shares(client, super().describe_all(client, eta_v))

    def with_shares(self, client: Client, v: Tensor) -> Tensor:
        """Return a descriptor [l] with the client's share of each class behind it, [l + C]."""
        return torch.cat([v, client.label_shares()]) if self.histogram else v
