"""The head of a model, its last linear layer, and the features, which are the head's input."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from pefll.core.errors import PefllError, unknown
from pefll.models.network import Network
from pefll.models.tracing import Tracer

T = TypeVar("T")


class Parts(Protocol):
    """Splits a model's flat vector [D] into two parts.

    Attributes:
        size: number of parameters of the second part.
    """

    size: int

    def split(self, theta: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return the two parts of a model [D]."""
        ...

    def join(self, first: Tensor, second: Tensor, /) -> Tensor:
        """Return the model [D] that consists of two parts."""
        ...

    def values(self, first: Tensor, second: Tensor, /) -> dict[str, Tensor]:
        """Return the parameters by name, so that the parts can be differentiated separately."""
        ...


class Head:
    """Splits a model's flat vector [D] into the head [h], the parameters of one layer, and the body [B], all others.

    Attributes:
        layer: name of the layer in the module; "" if the module itself is the layer.
        size: h, number of the head's parameters.
    """

    def __init__(self, network: Network, layer: str | None = None) -> None:
        """Find the head of `network`: the layer with the name `layer`, or by default the `nn.Linear` that runs last."""
        self.layer = last_linear(network.module) if layer is None else _existing_layer(network.module, layer)
        self._network = network
        prefix = f"{self.layer}." if self.layer else ""
        self._names = [name for name in network.names if name.startswith(prefix)]
        owned = network.module.get_submodule(self.layer).named_parameters()
        if self._names != [
            f"{prefix}{name}" for name, parameter in owned if parameter.requires_grad
        ]:  # a shared weight has only one of its names in the vector
            raise PefllError(
                f"layer {self.layer!r} shares weights with another layer, so it cannot be a head", code="PEFLL-N021"
            )
        self._sizes = [shape.numel() for shape in network.shapes]
        self._inside = [name in set(self._names) for name in network.names]
        self.size = sum(self._parts_of(True, self._sizes))
        self._features: Network | None = None

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return body [B] and head [h] of a model [D]."""
        parts = torch.split(theta, self._sizes)
        empty = theta.new_empty(0)
        return torch.cat([empty, *self._parts_of(False, parts)]), torch.cat([empty, *self._parts_of(True, parts)])

    def join(self, body: Tensor, head: Tensor) -> Tensor:
        """Return the model [D] that consists of a body [B] and a head [h]."""
        return self._network.flatten(list(self.values(body, head).values()))

    def values(self, body: Tensor, head: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, so that body [B] and head [h] can be differentiated separately."""
        of_head = iter(torch.split(head, self._parts_of(True, self._sizes)))
        of_body = iter(torch.split(body, self._parts_of(False, self._sizes)))
        network = self._network
        return {
            name: next(of_head if inside else of_body).view(shape)
            for name, shape, inside in zip(network.names, network.shapes, self._inside, strict=True)
        }

    def _parts_of(self, head: bool, parts: Sequence[T]) -> list[T]:
        """Return the parts that belong to the head, or with `head=False` to the body."""
        return [part for part, inside in zip(parts, self._inside, strict=True) if inside == head]

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the features [b, F] of samples x [b, ...], which are the head's input, for a model `theta` [D]."""
        if not self.layer:
            return x.flatten(1).to(theta.dtype)
        if self._features is None:
            # The extractor has no head, so its parameters are the body, in the order of `split`.
            self._features = Network(_FeatureExtractor(self._network.module, self.layer), may_be_empty=True)
        return self._features(self.split(theta)[0], x)

    def bias_place(self) -> tuple[int, int]:
        """Return the start and stop of the layer's bias in the model's flat vector."""
        name = f"{self.layer}.bias" if self.layer else "bias"
        if name not in self._network.names:
            raise PefllError(f"layer {self.layer!r} has no bias; give it one with bias=True", code="PEFLL-N022")
        start = sum(self._sizes[: self._network.names.index(name)])
        return start, start + self._sizes[self._network.names.index(name)]


class NoHead:
    """The interface of `Head` for a model without a head: all parameters are its body."""

    def __init__(self, network: Network) -> None:
        self._network, self.size = network, 0

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model [D] as the body, and an empty head [0]."""
        return theta, theta.new_empty(0)

    def join(self, body: Tensor, head: Tensor) -> Tensor:
        """Return the body [D]."""
        del head
        return body

    def values(self, body: Tensor, head: Tensor) -> dict[str, Tensor]:
        """Return the parameters of the body [D] by name."""
        del head
        return self._network.unflatten(body)


class HeadFirst:
    """The interface of `Head` with the head as the first part, and the body as the second."""

    def __init__(self, network: Network, parts: Parts) -> None:
        self._parts, self.size = parts, network.size - parts.size

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return head [h] and body [B] of a model [D]."""
        body, head = self._parts.split(theta)
        return head, body

    def join(self, head: Tensor, body: Tensor) -> Tensor:
        """Return the model [D] that consists of a head [h] and a body [B]."""
        return self._parts.join(body, head)

    def values(self, head: Tensor, body: Tensor) -> dict[str, Tensor]:
        """Return the parameters of head [h] and body [B] by name."""
        return self._parts.values(body, head)


def head_of(network: Network, layer: str) -> Head | NoHead:
    """Return the object that splits the models of a network into body and head.

    Args:
        network: the model.
        layer: auto for the last linear layer, none for no head, or the name of a layer.
    """
    if layer == "none":
        return NoHead(network)
    return Head(network, None if layer == "auto" else layer)


def last_linear(module: nn.Module) -> str:
    """Return the name of the `nn.Linear` that a module calls last; PefllError if it has no `nn.Linear`.

    If the module cannot be traced, it returns the `nn.Linear` that is defined last.
    """
    if isinstance(module, nn.Linear):
        return ""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    try:
        calls = [str(node.target) for node in Tracer().trace(copy.deepcopy(module)).nodes if node.op == "call_module"]
    except Exception:  # noqa: BLE001 - a user's code may raise anything
        calls = names
    called = [name for name in calls if name in names]
    if not called:
        raise PefllError(
            f"the model {type(module).__name__} has no nn.Linear layer as its head; make its last layer an nn.Linear",
            code="PEFLL-N023",
        )
    return called[-1]


def _existing_layer(module: nn.Module, layer: str) -> str:
    names = [name for name, part in module.named_modules() if name and any(True for _ in part.parameters())]
    if layer not in names:
        raise unknown("layer of the model", layer, names)
    return layer


class _FeatureExtractor(nn.Module):
    """A copy of a module that stops before one of its layers and returns this layer's input.

    Code after the layer, such as a log-softmax, does not run: it may not accept features.
    """

    def __init__(self, module: nn.Module, layer: str) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        last = self.module.get_submodule(layer)
        last._parameters.clear()
        last._modules.clear()
        last.__class__ = _Stop  # in place, because the module may contain the layer under several names

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.module(x)
        except _Reached as reached:
            return reached.features
        raise PefllError(
            f"the model {type(self.module).__name__} does not call its last nn.Linear layer", code="PEFLL-N024"
        )


class _Stop(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        raise _Reached(features)


class _Reached(Exception):
    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features
