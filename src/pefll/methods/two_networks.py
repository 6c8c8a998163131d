"""The base class of methods that generate models with an embedding network and a hypernetwork, such as PeFLL.

It builds both networks. It also has Algorithm 1 on two machines: a client has one half of the method, the server the
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from pefll.data.client import Client
from pefll.methods.contract import Cohort, Problem, everyone, undrawn_network
from pefll.methods.descriptor_size import DescriptorSize
from pefll.methods.refining import Refining
from pefll.models.embedding import build_embedding, check_embedding
from pefll.models.hypernetwork_choice import build_hypernetwork, check_hypernetwork
from pefll.models.network import Network, Parameters
from pefll.models.own import Choice, width_of


class Standardised(NamedTuple):
    """How descriptors are standardised: `shift` [] is subtracted from every number, `scale` [] divides it."""

    shift: Tensor
    scale: Tensor


class TwoNetworks(DescriptorSize, Refining):
    """A method with an embedding network φ and a hypernetwork h. A subclass has these attributes as fields.

    A subclass also defines `generate`, `describe_all`, and `serving`, which returns the η that makes personal models.

    Attributes:
        embedding: embedding network, by name or a user's own.
        hypernetwork: hypernetwork, by name or a user's own.
    """

    embedding: Choice
    hypernetwork: Choice

    network_settings: ClassVar[tuple[str, ...]] = ("embedding", "hypernetwork")

    def serving(self, server: Any) -> Any:
        """Return the η that makes personal models."""
        raise NotImplementedError

    def generate(self, server: Any, eta_h: Parameters, v: Tensor) -> Tensor:
        """Return personal models [c, D] for descriptors [c, l]."""
        raise NotImplementedError

    def describe_all(self, client: Client, eta_v: Tensor) -> Tensor:
        """Return a client's descriptor [l] of all its training samples."""
        raise NotImplementedError

    def check(self) -> None:
        """Build the networks and check a user's own, so that a wrong one is an error before the run starts."""
        check_embedding(self.phi, self.descriptor)
        check_hypernetwork(self.h, self.problem.model)

    @classmethod
    def settings_for(cls, problem: Problem, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the descriptor's size where `fit` does not take 0: for an own embedding network, and many clients."""
        embedding = given.get("embedding")
        if isinstance(embedding, nn.Module):
            sizes = problem.input_shape, problem.encoded
            width = width_of(embedding, *sizes, problem.tokens, problem.encodes)
            return {"descriptor_size": width} if width else {}
        return super().settings_for(problem, given)

    @cached_property
    def phi(self) -> Network:
        """The embedding network φ, with parameters η_v."""
        p = self.problem
        sizes = p.input_shape, p.encoded, self.descriptor
        return undrawn_network(build_embedding, self.embedding, *sizes, p.tokens, p.encodes)

    @cached_property
    def h(self) -> Network:
        """The hypernetwork h, with parameters η_h."""
        return undrawn_network(build_hypernetwork, self.hypernetwork, self.descriptor, self.problem.model)

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels to compute its descriptor, or to refine its model."""
        return bool(self.phi.module.uses_labels) or self.refine_steps > 0

    # Algorithm 1 on two machines, each with its own half of the networks.

    @property
    def sent_size(self) -> int:
        """Number of numbers in the descriptor that a client sends."""
        return self.descriptor

    def client_half(self, server: Any) -> dict[str, Tensor]:
        """Return η_v, with which a client makes its descriptor."""
        return {"embedder": self.serving(server).embedder}

    def client_half_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `client_half`."""
        return {"embedder": (self.phi.size,)}

    def server_half(self, server: Any) -> dict[str, Tensor]:
        """Return η_h, with which the server makes models, and how descriptors are standardised."""
        return {"hypernetwork": self.serving(server).hypernetwork, "shift": server.shift, "scale": server.scale}

    def server_half_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `server_half`."""
        return {"hypernetwork": (self.h.size,), "shift": (), "scale": ()}

    def describe_with(self, half: dict[str, Tensor], cohort: Cohort) -> Tensor:
        """Return the descriptors [c, l] of a cohort's clients."""
        return cohort.run(self.describe_all, everyone(half["embedder"]))  # type: ignore[no-any-return]

    def generate_with(self, half: dict[str, Tensor], v: Tensor) -> Tensor:
        """Return models [c, D] for descriptors [c, l]."""
        return self.generate(Standardised(half["shift"], half["scale"]), half["hypernetwork"], v)
