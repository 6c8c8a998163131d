"""Random embedding networks and hypernetworks: Gaussian distributions around the weights of a run's two networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pefll.core import randomness
from pefll.methods.pefll import Eta, PeFLL
from pefll.models.hypernetwork import Hypernetwork
from pefll.models.network import Network


@dataclass(frozen=True)
class Part:
    """Names of the parameters of both networks that are random. The other parameters are fixed."""

    hypernetwork: frozenset[str]
    embedder: frozenset[str]


@dataclass(frozen=True, eq=False)
class Posterior:
    """Independent Gaussians around the weights of both networks.

    Attributes:
        mean: the means, η_h [H] and η_v [E].
        alpha_h: variance of the hypernetwork's random weights.
        alpha_v: variance of the embedding network's random weights.
        part: names of the random weights.
    """

    mean: Eta
    alpha_h: float
    alpha_v: float
    part: Part


def every_part(method: PeFLL) -> Part:
    """Return the part with all parameters."""
    return Part(frozenset(method.h.names), frozenset(method.phi.names))


def descriptor_layer(method: PeFLL) -> Part:
    """Return the embedding network's last linear layer, whose outputs are descriptors; nothing if there is none."""
    names = {id(value): name for name, value in method.phi.module.named_parameters()}
    layers = [each for each in method.phi.module.modules() if isinstance(each, nn.Linear)]
    last = layers[-1].parameters() if layers else ()
    return Part(frozenset(), frozenset(names[id(each)] for each in last if id(each) in names))


def first_layer(method: PeFLL) -> Part:
    """Return the hypernetwork's first layer, which reads descriptors; nothing for another type of hypernetwork."""
    own = isinstance(method.h.module, Hypernetwork)
    return Part(frozenset({"first.weight", "first.bias"} if own else ()), frozenset())


def places(network: Network, names: Collection[str]) -> Iterator[slice]:
    """Yield where the named parameters lie in a network's flat vector."""
    start = 0
    for name, shape in zip(network.names, network.shapes, strict=True):
        if name in names:
            yield slice(start, start + shape.numel())
        start += shape.numel()


def squared_distances(method: PeFLL, part: Part, a: Eta, b: Eta | None) -> tuple[float, float]:
    """Return ‖a - b‖² over the part's weights, of the hypernetwork and of the embedding network; None for b = 0."""

    def of(network: Network, names: Collection[str], one: Tensor, other: Tensor | None) -> float:
        total = 0.0
        for place in places(network, names):
            difference = one[place].double() - (0 if other is None else other[place].double())
            total += float(difference.square().sum())
        return total

    return (
        of(method.h, part.hypernetwork, a.hypernetwork, None if b is None else b.hypernetwork),
        of(method.phi, part.embedder, a.embedder, None if b is None else b.embedder),
    )


def moved(method: PeFLL, part: Part, start: Eta, end: Eta, rho: float) -> Eta:
    """Return `start` with the part's weights moved towards `end`: start + ρ (end - start)."""

    def of(network: Network, names: Collection[str], one: Tensor, other: Tensor) -> Tensor:
        result = one.clone()
        for place in places(network, names):
            result[place] += rho * (other[place] - one[place])
        return result

    return Eta(
        of(method.h, part.hypernetwork, start.hypernetwork, end.hypernetwork),
        of(method.phi, part.embedder, start.embedder, end.embedder),
    )


def generator(seed: int, purpose: str, device: torch.device) -> torch.Generator:
    """Return a torch generator of random numbers on a device."""
    return torch.Generator(device).manual_seed(randomness.root_of(seed, purpose) & ((1 << 63) - 1))


def gaussian(shape: tuple[int, ...], like: Tensor, rng: torch.Generator) -> Tensor:
    """Return standard normal numbers with the type and device of `like`."""
    return torch.randn(shape, generator=rng, dtype=like.dtype, device=like.device)


def sampled_vectors(
    network: Network, mean: Tensor, alpha: float, names: Collection[str], count: int, rng: torch.Generator
) -> Tensor:
    """Return `count` draws of a network's weights, [count, size]; without random weights, `count` views of the mean."""
    if not names or not alpha:
        return mean.expand(count, -1)
    drawn = mean.repeat(count, 1)
    for place in places(network, names):
        noise = gaussian((count, place.stop - place.start), mean, rng)
        drawn[:, place].add_(noise, alpha=math.sqrt(alpha))
    return drawn


class SampledHypernetwork:
    """A hypernetwork that draws new weights for each row of its input.

    A linear layer with independent Gaussian weights maps one input x to independent Gaussian outputs: W̄x + b̄ is
    N(Wx + b, α(‖x‖² + 1) Id). So outputs are drawn, and not millions of weights. This is exact, because each draw of
    the weights has one input only. Other hypernetworks than `Hypernetwork` draw their weights.

    Args:
        network: the hypernetwork.
        alpha: variance of the random weights.
        names: names of the random weights. In a `Hypernetwork`, a layer is random as a whole.
        rng: draws.
    """

    def __init__(self, network: Network, alpha: float, names: Collection[str], rng: torch.Generator) -> None:
        self._network, self._alpha, self._names, self._rng = network, alpha, names, rng

    def __call__(self, eta_h: Tensor, v: Tensor) -> Tensor:
        """Return models [c, D] for standardised descriptors [c, l]."""
        if not self._names or not self._alpha:
            return self._network(eta_h, v)
        if not isinstance(self._network.module, Hypernetwork):
            rows = [
                self._network(sampled_vectors(self._network, eta_h, self._alpha, self._names, 1, self._rng)[0], each)
                for each in v[:, None]
            ]
            return torch.cat(rows)
        weights = self._network.unflatten(eta_h)
        z = self._linear(weights, "first", v)
        for place in range(len(self._network.module.hidden)):
            z = self._linear(weights, f"hidden.{place}", F.relu(z))
        return self._linear(weights, "last", z)

    def _linear(self, weights: dict[str, Tensor], layer: str, x: Tensor) -> Tensor:
        """Return the outputs [c, n] of a layer for inputs [c, m]."""
        output = F.linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"])
        if f"{layer}.weight" not in self._names:
            return output
        deviation = (self._alpha * (x.square().sum(dim=1, keepdim=True) + 1)).sqrt()
        return output + deviation * gaussian(tuple(output.shape), output, self._rng)


def with_hypernetwork(method: PeFLL, hypernetwork: Any) -> PeFLL:
    """Return the method with a function (η_h, v) -> θ in place of its hypernetwork, for `generate`."""
    changed = copy.copy(method)
    vars(changed)["h"] = hypernetwork  # the place of the cached property `h`
    return changed
