"""A network as a pure function of one flat parameter vector.

The hypernetwork generates such vectors, clients train them, the server averages them. No method needs to know the
layers of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pefll.core import randomness
from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.models.check import check_layers

Parameters: TypeAlias = Tensor | dict[str, Tensor]


@reference
def fused(module: nn.Module) -> nn.Module:
    """Return a module that computes what `module` does, with the same parameters under the same names."""
    return module


@reference
def split(vector: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return consecutive parts of a vector [D]."""
    # Its backward pass is one concatenation. With slices each part would fill a vector of full length.
    return torch.split(vector, sizes)


class Network:
    """An `nn.Module` as a function `output = network(parameters, *inputs)` with `parameters` [size].

    Frozen parameters (`requires_grad` is False) are constants, like buffers, and not in the vector.

    It is thread-safe: every call uses its own copy of the module. The given module does not change.

    Attributes:
        module: the architecture and the constants. Its weights are used only by `init`, for layers without
            `reset_parameters`.
        names: of the parameters, in the order of the flat vector.
        shapes: of the parameters, in the same order.
        size: the length of the flat vector.
    """

    def __init__(self, module: nn.Module, may_be_empty: bool = False) -> None:
        """Check a module and list its parameters; only with `may_be_empty` it may have none."""
        check_layers(module)
        self.module = module
        # A copy, because a user's code may store what it computes, such as attention weights for a figure.
        pattern = copy.deepcopy(module, _shared_tensors(module))
        self._pattern = pattern, fused(pattern)
        self._idle = [self._copy()]
        learnt = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.names = list(learnt)
        self.shapes = [parameter.shape for parameter in learnt.values()]
        self._sizes = [parameter.numel() for parameter in learnt.values()]
        self.size = sum(self._sizes)
        self._placed: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        if self.size == 0 and not may_be_empty:
            frozen = " that are not frozen" if any(True for _ in module.parameters()) else ""
            raise PefllError(
                f"the model {type(module).__name__} has no parameters{frozen}, so it cannot be trained",
                code="PEFLL-N025",
            )

    @property
    def constants(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters, by name."""
        frozen = {name: value.detach() for name, value in self.module.named_parameters() if not value.requires_grad}
        return frozen | dict(self.module.named_buffers())

    def __call__(self, parameters: Parameters, *inputs: Tensor) -> Tensor:
        """Return the module's output with the weights in `parameters`: one vector [size], or tensors by name."""
        named = self.unflatten(parameters) if isinstance(parameters, Tensor) else parameters
        like = parameters if isinstance(parameters, Tensor) else next(iter(named.values()))
        values = named | self._constants(like)
        # Like `torch.func.functional_call`, without looking up each weight's place at every call. A list's `pop` and
        # `append` are atomic, so no two calls share a copy, neither in other threads nor nested.
        try:
            mine = self._idle.pop()
        except IndexError:
            mine = self._another_copy()
        try:
            for slots, key, name in mine.places:
                slots[key] = values[name]
            output: Tensor = mine.fused(*inputs)
        except Exception:
            if mine.fused is not mine.module:  # the traceback then names a line of the user's code
                mine.module(*inputs)
            raise
        finally:
            for (slots, key, _), value in zip(mine.places, mine.own, strict=True):
                slots[key] = value
            self._idle.append(mine)
        return output

    def unflatten(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return views of the flat vector [size], named and shaped as the module's parameters."""
        return self._named(split(parameters, self._sizes))

    def in_parts(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the same views, to differentiate with respect to them and not to the vector [size]."""
        return self._named(torch.split(parameters, self._sizes))

    def flatten(self, values: Sequence[Tensor]) -> Tensor:
        """Return parameters, in the order of `names`, as one flat vector [size]."""
        return torch.cat([value.reshape(-1) for value in values])

    def init(self, seed: int, purpose: str) -> Tensor:
        """Return initial weights as the module's layers draw them, float32 [size] on the CPU.

        The seed is that of the run; each network of a run has another purpose.
        """
        with randomness.initial_weights(seed, f"init/{purpose}"), torch.no_grad():
            module = copy.deepcopy(self.module)
            for layer in module.modules():
                reset = getattr(layer, "reset_parameters", None)
                if callable(reset):
                    reset()
            drawn = dict(module.named_parameters())
            return self.flatten([drawn[name].detach().float().cpu() for name in self.names]).clone()

    def with_parameters(self, parameters: Tensor) -> nn.Module:
        """Return a copy of the module, on the CPU, with the weights in `parameters` [size]."""
        module = copy.deepcopy(self.module).cpu()
        # Not strict: the copy already has the constants, and a shared weight has only one name here.
        module.load_state_dict(self.unflatten(parameters.detach().cpu()), strict=False)
        return module

    def _named(self, parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def _copy(self) -> _Copy:
        module, rewritten = copy.deepcopy(self._pattern, _shared_tensors(self._pattern[0]))
        places = _places(module)
        return _Copy(module, rewritten, places, [slots[key] for slots, key, _ in places])

    def _another_copy(self) -> _Copy:
        # In a new thread, where copied tensors are ordinary ones even if the caller runs under vmap.
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(self._copy).result()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without module copies, which may hold computed tensors."""
        return {key: value for key, value in vars(self).items() if key != "_idle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of `__getstate__`."""
        vars(self).update(state, _idle=[])

    def _constants(self, like: Tensor) -> dict[str, Tensor]:
        place = (like.device, like.dtype)
        if place not in self._placed:
            self._placed[place] = {
                name: value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
                for name, value in self.constants.items()
            }
        return self._placed[place]


class _Copy(NamedTuple):
    """A copy of a network's module, used by one call at a time.

    Attributes:
        module: as the user wrote it.
        fused: computes the same with the same layers in fewer operations; may be `module` itself.
        places: of parameters and buffers; see `_places`.
        own: the tensors at these places between two calls.
    """

    module: nn.Module
    fused: nn.Module
    places: list[tuple[dict[str, Any], str, str]]
    own: list[Tensor]


def _shared_tensors(module: nn.Module) -> dict[int, object]:
    """Return a memo for `copy.deepcopy` with which a module's copy shares its parameters and buffers."""
    return {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Return for each parameter and buffer a layer's dictionary, the key in it, and the tensor's first name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    first_name = {id(tensor): name for name, tensor in named}
    return [
        (slots, key, first_name[id(tensor)])
        for layer in module.modules()
        for slots in (layer._parameters, layer._buffers)
        for key, tensor in slots.items()
        if tensor is not None
    ]
