"""A network as a pure function of one flat parameter vector.

The hypernetwork writes such vectors, the clients change them, the server averages them: no method needs to know which
layers a model has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pefll import randomness
from pefll.errors import PefllError
from pefll.models.fused import fused
from pefll.ops import vectors

Parameters: TypeAlias = Tensor | dict[str, Tensor]


class Network:
    """An `nn.Module` seen as `output = network(parameters, *inputs)` with `parameters` [size].

    Attributes:
        module: gives the architecture; its own weights are used only by `init`, where it cannot draw new ones.
        names: of the parameters, in the order in which they lie in the flat vector.
        shapes: of the parameters, in the same order.
        size: the length of the flat vector.
    """

    def __init__(self, module: nn.Module) -> None:
        refuse_changing_state(module)
        self.module = module
        self._fused = fused(module)
        self._places = _places(self._fused)
        self.names = [name for name, _ in module.named_parameters()]
        self.shapes = [parameter.shape for parameter in module.parameters()]
        self._sizes = [parameter.numel() for parameter in module.parameters()]
        self.size = sum(self._sizes)
        self._buffers: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        if self.size == 0:
            raise PefllError(f"the model {type(module).__name__} has no parameters, so there is nothing to learn")

    def __call__(self, parameters: Parameters, *inputs: Tensor) -> Tensor:
        """Evaluate the module with the weights in `parameters`: one vector [size], or tensors by name."""
        named = self.unflatten(parameters) if isinstance(parameters, Tensor) else parameters
        values = named | self._constants(next(iter(named.values())))
        # As `torch.func.functional_call`, which would look for every weight's place again at every call.
        before = [slots[key] for slots, key, _ in self._places]
        try:
            for slots, key, name in self._places:
                slots[key] = values[name]
            output: Tensor = self._fused(*inputs)
        finally:
            for (slots, key, _), value in zip(self._places, before, strict=True):
                slots[key] = value
        return output

    def unflatten(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return views of the flat vector [size], named and shaped as the module's parameters."""
        # `split` has one concatenation as its backward pass; slices would each fill a vector of full length.
        split = vectors.split if vectors.splits(parameters, len(self._sizes)) else torch.split
        return self._named(split(parameters, self._sizes))

    def in_parts(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the same views, for who differentiates with respect to them and not to the vector [size]."""
        return self._named(torch.split(parameters, self._sizes))

    def separate(self, parameters: Tensor) -> Parameters:
        """Return what a server differentiates with respect to: parts, where kernels take gradients in parts."""
        return self.in_parts(parameters) if vectors.splits(parameters, len(self._sizes)) else parameters

    def flatten(self, values: Sequence[Tensor]) -> Tensor:
        """Return parameters, in the order of `names`, as one flat vector [size]."""
        return torch.cat([value.reshape(-1) for value in values])

    def init(self, seed: int, purpose: str) -> Tensor:
        """Draw initial weights on the CPU as the module's layers do.

        Args:
            seed: of the run.
            purpose: tells networks of one run apart.

        Returns:
            float32 [size].
        """
        with randomness.initial_weights(seed, f"init/{purpose}"), torch.no_grad():
            module = copy.deepcopy(self.module)  # a user's own module keeps its weights
            for layer in module.modules():
                reset = getattr(layer, "reset_parameters", None)
                if callable(reset):
                    reset()
            return self.flatten([value.detach().float().cpu() for value in module.parameters()]).clone()

    def with_parameters(self, parameters: Tensor) -> nn.Module:
        """Return a copy of the module, on the CPU, with the weights in `parameters` [size]."""
        module = copy.deepcopy(self.module).cpu()
        # Not strict: constants are in the copy already, and a weight that is used twice has one name here.
        module.load_state_dict(self.unflatten(parameters.detach().cpu()), strict=False)
        return module

    def _named(self, parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def _constants(self, like: Tensor) -> dict[str, Tensor]:
        place = (like.device, like.dtype)
        if place not in self._buffers:
            self._buffers[place] = {
                name: buffer.to(like.device, like.dtype if buffer.is_floating_point() else buffer.dtype)
                for name, buffer in self.module.named_buffers()
            }
        return self._buffers[place]


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Return where each parameter and buffer lies: a layer's dictionary, the key in it, and the tensor's first name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    first_name = {id(tensor): name for name, tensor in named}
    return [
        (slots, key, first_name[id(tensor)])
        for layer in module.modules()
        for slots in (layer._parameters, layer._buffers)
        for key, tensor in slots.items()
        if tensor is not None
    ]


def refuse_changing_state(module: nn.Module) -> None:
    """Raise PefllError where a layer keeps statistics or draws random numbers while it trains."""
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(layer, "track_running_stats", False):
            raise PefllError(
                f"{where} keeps statistics of batches, which no hypernetwork can generate; use GroupNorm or LayerNorm"
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise PefllError(f"{where} draws its own random numbers, so runs would not repeat; set its p to 0")


def check_model(network: Network, input_shape: tuple[int, ...], classes: int, tokens: bool) -> None:
    """Raise PefllError where a client model does not map each sample of `input_shape` to `classes` scores.

    Samples must not influence each other, and the same sample must get the same scores again: otherwise padding would
    change results, and runs would not repeat.
    """
    name = type(network.module).__name__
    before = {key: buffer.clone() for key, buffer in network.module.named_buffers()}
    with randomness.initial_weights(0, "example"):
        shape = (3, *input_shape)
        example = torch.zeros(shape, dtype=torch.int64) if tokens else torch.randn(shape)
        try:
            with torch.no_grad():
                output, again, alone = (network.module(x) for x in (example, example, example[:2]))
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PefllError(f"the model {name} does not accept samples of shape {input_shape}: {reason}") from error
    for key, buffer in network.module.named_buffers():
        if not torch.equal(buffer, before[key]):
            raise PefllError(f"the model {name} changes its buffer {key!r} when it is evaluated; remove it")
    if not isinstance(output, Tensor):
        raise PefllError(f"the model {name} returns a {type(output).__name__}; it must return one tensor of scores")
    if tuple(output.shape) != (3, classes):
        raise PefllError(
            f"the model {name} gives {tuple(output.shape)[1:]} scores per sample but there are {classes} classes; "
            "make its last layer as wide as the number of classes"
        )
    if not torch.equal(output, again):
        raise PefllError(f"the model {name} gives the same samples other scores each time; remove what is random in it")
    if not torch.allclose(output[:2], alone, rtol=1e-3, atol=1e-4):
        raise PefllError(f"the model {name} gives a sample other scores in other batches; remove what mixes samples")
