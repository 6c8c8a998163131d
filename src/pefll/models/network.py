"""Networks as pure functions of one flat parameter vector.

The hypernetwork generates such vectors, clients train them, the server averages them. So methods do not need to know
the layers of a model.
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
    """Return a module with the same parameters, names and output as `module`; faster versions fuse its layers."""
    return module


@reference
def split(vector: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return consecutive parts of a vector [D] with the given sizes."""
    # The backward pass of `torch.split` is one concatenation. For slices, it would fill one vector [D] per part.
    return torch.split(vector, sizes)


class Network:
    """An `nn.Module` as a function `output = network(parameters, *inputs)` with `parameters` [size].

    Frozen parameters (`requires_grad` is False) are constants like buffers, and are not in the vector.

    A network is thread-safe: simultaneous calls use different copies of the module. The given module does not change.

    Attributes:
        module: gives the architecture and the constants. Only `init` uses its weights, for layers without
            `reset_parameters`.
        names: names of the parameters, in the order of the flat vector.
        shapes: shapes of the parameters, in the same order.
        size: length of the flat vector.
    """

    def __init__(self, module: nn.Module, may_be_empty: bool = False) -> None:
        """Check a module and list its parameters. Without `may_be_empty`, PefllError if it has no parameters."""
        check_layers(module)
        self.module = module
        # A copy, because a user's code may store results in the module, such as attention weights for a figure.
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
        # This is `torch.func.functional_call` without its search for each weight at every call. A list's `pop` and
        # `append` are atomic. So no two calls use the same copy, even in other threads or nested.
        try:
            mine = self._idle.pop()
        except IndexError:
            mine = self._another_copy()
        try:
            for slots, key, name in mine.places:
                slots[key] = values[name]
            output: Tensor = mine.fused(*inputs)
        except Exception:
            if mine.fused is not mine.module:  # repeat the error, so that the traceback shows the user's code
                mine.module(*inputs)
            raise
        finally:
            for (slots, key, _), value in zip(mine.places, mine.own, strict=True):
                slots[key] = value
            self._idle.append(mine)
        return output

    def unflatten(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return views of the flat vector [size] with the names and shapes of the module's parameters."""
        return self._named(split(parameters, self._sizes))

    def in_parts(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the same views, for derivatives with respect to each view instead of the vector [size]."""
        return self._named(torch.split(parameters, self._sizes))

    def flatten(self, values: Sequence[Tensor]) -> Tensor:
        """Return one flat vector [size] of parameters that are in the order of `names`."""
        return torch.cat([value.reshape(-1) for value in values])

    def init(self, seed: int, purpose: str) -> Tensor:
        """Return random initial weights, which the module's layers draw, float32 [size] on the CPU.

        `seed` is the seed of the run. Each network of a run needs another `purpose`.
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
        # `strict=False`, because the vector has no constants, and has a shared weight under one name only.
        module.load_state_dict(self.unflatten(parameters.detach().cpu()), strict=False)
        return module

    def _named(self, parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def _copy(self) -> _Copy:
        module, rewritten = copy.deepcopy(self._pattern, _shared_tensors(self._pattern[0]))
        places = _places(module)
        return _Copy(module, rewritten, places, [slots[key] for slots, key, _ in places])

    def _another_copy(self) -> _Copy:
        # Copy in a new thread: under vmap, copies made in this thread would be vmap's tensors.
        with ThreadPoolExecutor(1) as aside:
            return aside.submit(self._copy).result()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without module copies, because these may contain computed tensors."""
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
    """A copy of a network's module. Only one call at a time uses it.

    Attributes:
        module: the module as the user wrote it.
        fused: a module with the same layers and output in fewer operations; may be `module` itself.
        places: dictionary entries of parameters and buffers; see `_places`.
        own: tensors in these entries between two calls.
    """

    module: nn.Module
    fused: nn.Module
    places: list[tuple[dict[str, Any], str, str]]
    own: list[Tensor]


def _shared_tensors(module: nn.Module) -> dict[int, object]:
    """Return a memo for `copy.deepcopy`, so that a copy of the module shares its parameters and buffers."""
    return {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Return (layer's dictionary, key in it, first name of the tensor) for each parameter and buffer."""
    named = [*module.named_parameters(), *module.named_buffers()]
    first_name = {id(tensor): name for name, tensor in named}
    return [
        (slots, key, first_name[id(tensor)])
        for layer in module.modules()
        for slots in (layer._parameters, layer._buffers)
        for key, tensor in slots.items()
        if tensor is not None
    ]
