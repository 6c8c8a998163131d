"""PeFLL+ is not in the paper. It is one architecture for images of few classes, of many classes, and of many writers.

A descriptor has two halves, one of samples and one of labels, followed by the client's share of each class. The server
adds the label prior to the models that it generates. More weight decay keeps these models small. Personal models are
made with the running mean of the server's networks over rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pefll.methods.contract import undrawn_network
from pefll.methods.pefll_prior import PeFLLPrior
from pefll.models.embedding import build_embedding
from pefll.models.network import Network
from pefll.models.own import Choice


@dataclass(frozen=True)
class PeFLLPlus(PeFLLPrior):
    """PeFLL with two embeddings, a label prior, a running mean of the server's networks and more weight decay.

    Attributes:
        embedding: embedding network, as for pefll; auto is two (half of samples, half of labels), or linear for text.
        hypernetwork: size of the hypernetwork, as for pefll.
        descriptor_size: l, size of a descriptor; 0 for int(1 + n / 4) with n clients, but at least 2.
        server_average: decay of the running mean of η; 0 for no running mean.
        lambda_theta: λ_θ of the objective, half of the weight decay on generated models.
    """

    embedding: Choice = "auto"
    hypernetwork: Choice = "L"
    server_average: float = 0.98
    lambda_theta: float = 5e-4

    @cached_property
    def descriptor(self) -> int:
        """l, the size of a descriptor without the shares of classes."""
        return self.descriptor_size or max(2, int(1 + self.problem.num_clients / 4))

    @cached_property
    def phi(self) -> Network:
        """The embedding network φ, with parameters η_v."""
        p = self.problem
        name = "two" if self.embedding == "auto" and not p.tokens else self.embedding
        sizes = p.input_shape, p.encoded, self.descriptor
        return undrawn_network(build_embedding, name, *sizes, p.tokens, p.encodes)
