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
from torch.nn.parameter import is_lazy

from pefll import randomness
from pefll.errors import PefllError, first_line
from pefll.models.fused import fused
from pefll.ops import vectors
from pefll.ops.alone import gradient

Parameters: TypeAlias = Tensor | dict[str, Tensor]


class Network:
    """An `nn.Module` seen as `output = network(parameters, *inputs)` with `parameters` [size].

    Parameters that are frozen (`requires_grad` is False) are constants, as buffers are, and not in the vector.

    Attributes:
        module: gives the architecture and the constants; its own weights are used only by `init`, where it cannot draw
            new ones.
        names: of the parameters, in the order in which they lie in the flat vector.
        shapes: of the parameters, in the same order.
        size: the length of the flat vector.
    """

    def __init__(self, module: nn.Module, may_be_empty: bool = False) -> None:
        """Take a module apart.

        Args:
            module: the network.
            may_be_empty: whether it may have no parameters.
        """
        refuse_changing_state(module)
        refuse_parameters(module)
        self.module = module
        recorded = fused(module)
        self._is_rewritten = recorded is not module
        self._fused = recorded if self._is_rewritten else _copied(module)
        self._places = _places(self._fused)
        learnt = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.names = list(learnt)
        self.shapes = [parameter.shape for parameter in learnt.values()]
        self._sizes = [parameter.numel() for parameter in learnt.values()]
        self.size = sum(self._sizes)
        self._placed: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        if self.size == 0 and not may_be_empty:
            frozen = " that are not frozen" if any(True for _ in module.parameters()) else ""
            raise PefllError(
                f"the model {type(module).__name__} has no parameters{frozen}, so there is nothing to learn"
            )

    @property
    def constants(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters, by name."""
        frozen = {name: value.detach() for name, value in self.module.named_parameters() if not value.requires_grad}
        return frozen | dict(self.module.named_buffers())

    def __call__(self, parameters: Parameters, *inputs: Tensor) -> Tensor:
        """Evaluate the module with the weights in `parameters`: one vector [size], or tensors by name."""
        named = self.unflatten(parameters) if isinstance(parameters, Tensor) else parameters
        like = parameters if isinstance(parameters, Tensor) else next(iter(named.values()))
        values = named | self._constants(like)
        # As `torch.func.functional_call`, which would look for every weight's place again at every call.
        before = [slots[key] for slots, key, _ in self._places]
        try:
            for slots, key, name in self._places:
                slots[key] = values[name]
            output: Tensor = self._fused(*inputs)
        except Exception:
            if self._is_rewritten:  # as the user wrote it, it fails in a line that can be named
                self.module(*inputs)
            raise
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
            drawn = dict(module.named_parameters())
            return self.flatten([drawn[name].detach().float().cpu() for name in self.names]).clone()

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
        if place not in self._placed:
            self._placed[place] = {
                name: value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
                for name, value in self.constants.items()
            }
        return self._placed[place]


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy to run in the place of a module, whose code may keep what it computes: attention, for a picture.

    A module that holds such a thing can be copied no more.
    """
    for name, layer in module.named_modules():
        for key, value in vars(layer).items():
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise PefllError(
                    f"{_where(name, layer)} holds {key!r}, which was computed, so that it cannot be copied: give a "
                    "model that was not used yet; in place of torch.nn.utils.weight_norm take the one in "
                    "torch.nn.utils.parametrizations"
                )
    return copy.deepcopy(module)


def _where(name: str, layer: nn.Module) -> str:
    return f"layer {name!r} ({type(layer).__name__})" if name else f"the model {type(layer).__name__}"


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
    """Raise PefllError where a layer keeps statistics, draws random numbers or mixes samples while it trains."""
    for name, layer in module.named_modules():
        where = _where(name, layer)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(layer, "track_running_stats", False):
            raise PefllError(
                f"{where} keeps statistics of batches, which no hypernetwork can generate; use GroupNorm or LayerNorm"
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise PefllError(f"{where} draws its own random numbers, so runs would not repeat; set its p to 0")
        for option in ("sparse", "scale_grad_by_freq"):
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and getattr(layer, option):
                raise PefllError(
                    f"{where} has gradients that clients cannot compute side by side; set its {option} to False"
                )


def refuse_parameters(module: nn.Module) -> None:
    """Raise PefllError for parameters that cannot lie in one vector of real numbers, and for layers that are hidden."""
    known = set(module.modules())
    for name, layer in module.named_modules():
        where = _where(name, layer)
        for key, value in layer.named_parameters(recurse=False):
            if is_lazy(value):
                raise PefllError(
                    f"{where} does not know its shape yet: call the model once on an example, such as "
                    "torch.zeros(1, *input_shape), before you give it"
                )
            if value.is_complex() and value.requires_grad:
                raise PefllError(
                    f"{where} has a complex parameter {key!r}; make it a real one with one more axis of length 2, and "
                    "torch.view_as_complex of it where it is used"
                )
        for key, value in vars(layer).items():
            held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            if not key.startswith("_") and any(isinstance(one, nn.Module) and one not in known for one in held):
                raise PefllError(
                    f"{_where(name, layer)} has layers in a plain {type(value).__name__}, {key!r}, where nobody trains "
                    "them; use nn.ModuleList or nn.ModuleDict"
                )


def check_model(network: Network, input_shape: tuple[int, ...], classes: int, tokens: bool) -> None:
    """Raise PefllError where a client model does not map each sample of `input_shape` to `classes` scores.

    Samples must not influence each other, and the same sample must get the same scores again: otherwise padding would
    change results, and runs would not repeat.
    """
    module = copy.deepcopy(network.module)  # which may change when it is evaluated
    name = f"the model {type(module).__name__}"
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise PefllError(
                f"{name} has a parameter {key!r} of {parameter.dtype}; make all float32, with model.float()"
            )
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with randomness.initial_weights(0, "example"), torch.no_grad():
        example = _example(module, (3, *input_shape), tokens)
        given = example.clone()
        try:
            output, again, pair = (module(x) for x in (given, example.clone(), example[:2].clone()))
        except Exception as error:
            raise PefllError(f"{name} does not accept samples of shape {input_shape}: {first_line(error)}") from error
        for key, value in module.state_dict().items():
            if not torch.equal(value, before[key]):
                kind = "parameter" if key in network.names else "buffer"
                raise PefllError(f"{name} changes its {kind} {key!r} when it is evaluated; remove it")
        if not torch.equal(given, example):
            raise PefllError(
                f"{name} changes the samples that it is given; write x = x - 1 for x -= 1, without inplace=True"
            )
        if not isinstance(output, Tensor):
            raise PefllError(f"{name} returns a {type(output).__name__}; it must return one tensor of scores")
        if tuple(output.shape) != (3, classes):
            raise PefllError(
                f"{name} gives {tuple(output.shape)[1:]} scores per sample but there are {classes} classes; "
                "make its last layer as wide as the number of classes"
            )
        if output.dtype != torch.float32:
            raise PefllError(f"{name} returns scores of {output.dtype} for samples of torch.float32; convert them")
        if not torch.equal(output, again):
            raise PefllError(f"{name} gives the same samples other scores each time; remove what is random in it")
        if not _alike(output[:2], pair):
            raise PefllError(f"{name} gives a sample other scores in other batches; remove what mixes samples")
        _check_one_sample(module, name, example[:1], output[:1])
        if not _alike(module.eval()(example.clone()), output):
            raise PefllError(f"{name} gives other scores after eval(), as it will be used, than in training; mend that")
    _check_trains(network, name, example)


def _example(module: nn.Module, shape: tuple[int, ...], tokens: bool) -> Tensor:
    """Return samples to try a module with."""
    if tokens:
        return torch.zeros(shape, dtype=torch.int64)
    example = torch.randn(shape)
    try:
        module(example.clone())
    except Exception:  # noqa: BLE001 - whatever code a user has written; it may take features for numbers of words
        return example.abs().clamp(max=0.99)
    return example


def _check_one_sample(module: nn.Module, name: str, sample: Tensor, scores: Tensor) -> None:
    try:
        alone = module(sample.clone())
    except Exception as error:
        raise PefllError(f"{name} does not accept one sample alone, [1, ...]: {first_line(error)}") from error
    if not isinstance(alone, Tensor) or alone.shape != scores.shape:
        raise PefllError(
            f"{name} gives one sample alone scores of shape {tuple(alone.shape)} and not {tuple(scores.shape)}; "
            "name the axes that squeeze() is to remove"
        )
    if not _alike(scores, alone):
        raise PefllError(f"{name} gives a sample other scores in other batches; remove what mixes samples")


def _check_trains(network: Network, name: str, example: Tensor) -> None:
    """Raise PefllError where the gradient of the parameters cannot be computed."""
    own = dict(network.module.named_parameters())
    theta = network.flatten([own[key].detach().cpu() for key in network.names])
    try:
        gradient(lambda at: network(at, example.clone()).square().sum(), theta)
    except Exception as error:
        raise PefllError(f"{name} has no gradient that a client could follow: {first_line(error)}") from error


def _alike(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4)
