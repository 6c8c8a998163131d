"""PeFLL with a label prior, which rules out classes that a client does not have. It is not in the paper.

A client's descriptor also has its share of each class. The server adds the logarithm of these shares to the generated
output bias. This is Bayes' rule for a client with its own label distribution. A client without labels reports equal
shares, which do not change its predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from pefll.core.wording import either
from pefll.data.client import Client
from pefll.methods.contract import require
from pefll.methods.pefll import PeFLL, Server
from pefll.methods.two_networks import Standardised
from pefll.models.head import Head
from pefll.models.network import Parameters


@dataclass(frozen=True)
class PeFLLPrior(PeFLL):
    """PeFLL with descriptors [l + C] that end with the client's share p of each class.

    Attributes:
        tau: τ, strength of the prior; the server adds τ log(p + ε) to the generated output bias.
        epsilon: ε, added to every share, because a class without samples has share 0.
        histogram: whether clients send their shares of classes; otherwise this method is PeFLL.
    """

    tau: float = 1.0
    epsilon: float = 1e-3
    histogram: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epsilon != 0, "epsilon is 0; it must be more than 0", code="PEFLL-S011")

    def check(self) -> None:
        """Raise PefllError unless labels are classes and the model has one output bias per class."""
        super().check()
        require(
            self.problem.classes > 0 or not self.histogram,
            f"{type(self).__name__} has a label prior, which needs classes, but these labels are not classes; "
            f"{either('add --set histogram=false', 'set histogram=False')}, or take the method pefll",
            code="PEFLL-S519",
        )
        start, stop = self.bias if self.problem.classes else (0, 0)
        require(
            stop - start == self.problem.classes,
            f"the model's last linear layer has {stop - start} outputs, not one for each class",
            code="PEFLL-S012",
        )

    @cached_property
    def bias(self) -> tuple[int, int]:
        """Start and end of the output bias in a model's flat vector."""
        return Head(self.problem.model).bias_place()

    @property
    def sent_size(self) -> int:
        """Number of numbers in the descriptor that a client sends, with its shares of classes."""
        return self.descriptor + (self.problem.classes if self.histogram else 0)

    def generate(self, server: Server | Standardised, eta_h: Parameters, v: Tensor) -> Tensor:
        """Return h(v; η_h) with τ log(p + ε) added to the output bias, [c, D], for descriptors [c, l + C]."""
        if not self.histogram:
            return super().generate(server, eta_h, v)
        v, p = torch.split(v, [self.descriptor, self.problem.classes], dim=1)
        start, stop = self.bias
        prior = self.tau * (p + self.epsilon).log()
        return super().generate(server, eta_h, v) + F.pad(prior, (start, self.problem.model.size - stop))

    def describe(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v, the mean of φ over a random batch, and p, the share of each class, [l + C]."""
        return self.with_shares(client, super().describe(client, eta_v))

    def describe_all(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return v, the mean of φ over all training samples, and p, the share of each class, [l + C]."""
        return self.with_shares(client, super().describe_all(client, eta_v))

    def with_shares(self, client: Client, v: Tensor) -> Tensor:
        """Return a descriptor [l] followed by the client's share of each class, [l + C]."""
        return torch.cat([v, client.label_shares()]) if self.histogram else v
