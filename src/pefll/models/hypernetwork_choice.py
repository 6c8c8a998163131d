"""Hypernetworks by name, and a user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from pefll.core.errors import unknown
from pefll.core.wording import counted
from pefll.models.chunked import ChunkedHypernetwork
from pefll.models.hypernetwork import HIDDEN_LAYERS, Hypernetwork
from pefll.models.low_rank import LowRankHypernetwork, fresh_weights
from pefll.models.network import Network
from pefll.models.own import Choice, OwnHypernetwork, build_own, check_network, is_own


def _of_size(size: str, descriptor: int, model: Network) -> nn.Module:
    return Hypernetwork(descriptor, model.size, size)


def _chunked(descriptor: int, model: Network) -> nn.Module:
    return ChunkedHypernetwork(descriptor, model.shapes)


def _low_rank(descriptor: int, model: Network) -> nn.Module:
    return LowRankHypernetwork(descriptor, model.shapes, partial(fresh_weights, model.module, model.names))


HYPERNETWORKS: dict[str, Callable[[int, Network], nn.Module]] = {
    **{size: partial(_of_size, size) for size in HIDDEN_LAYERS},
    "chunked": _chunked,
    "low-rank": _low_rank,
}


def build_hypernetwork(choice: Choice, descriptor: int, model: Network) -> nn.Module:
    """Return a hypernetwork, which maps descriptors [c, l] to client models [c, D].

    Args:
        choice: a key of HYPERNETWORKS, `"package.module:function"`, a module, or a function of (descriptor, weights).
        descriptor: l, size of a descriptor.
        model: the client model.
    """
    if is_own(choice):
        net = build_own(choice, "hypernetwork", descriptor_size=descriptor, weights=model.size)
        return OwnHypernetwork(net, descriptor)
    assert isinstance(choice, str)
    if choice not in HYPERNETWORKS:
        raise unknown("hypernetwork", choice, [*HYPERNETWORKS, "your.module:function"])
    return HYPERNETWORKS[choice](descriptor, model)


def check_hypernetwork(network: Network, model: Network) -> None:
    """Raise PefllError unless a user's own hypernetwork makes the weights of a client model; other networks pass."""
    advice = (
        f"the client model has {counted(model.size, 'weight')}; make its last layer as wide, or pass a function of "
        "(descriptor_size, weights)"
    )
    check_network(network, model.size, advice)
