"""A user's own embedding network or hypernetwork: its name, how it is built, and what is checked before a run.

It is given as an `nn.Module`, as a function that builds one, or as a name `package.module:function`. A run's settings
are text. So for the first two, they keep the name of the class or function with a note that it was given in Python.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from pefll.core import randomness
from pefll.core.arguments import shown
from pefll.core.derivatives import pull_back
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault, import_name
from pefll.models.check import alike, some_sample, some_weights

if TYPE_CHECKING:
    from pefll.models.network import Network

# A name, a module, or a function that returns a module.
Choice: TypeAlias = str | nn.Module | Callable[..., nn.Module]
GIVEN = " (given in Python)"
SHOWN = 16  # numbers of an output that a probe keeps


def name_of(choice: Choice) -> str:
    """Return the text that a run's settings keep for a choice; a name stays as it is."""
    if isinstance(choice, str):
        return choice
    named = type(choice) if isinstance(choice, nn.Module) else choice
    return f"{getattr(named, '__qualname__', type(named).__name__)}{GIVEN}"


def is_given(value: Any) -> TypeGuard[nn.Module | Callable[..., nn.Module]]:
    """Return whether a value is a module or a function, given in Python."""
    return isinstance(value, nn.Module) or callable(value)


def is_own(choice: Choice) -> bool:
    """Return whether a choice is a user's own network, and not one of this package."""
    return not isinstance(choice, str) or ":" in choice or choice.endswith(GIVEN)


def build_own(choice: Choice, setting: str, **arguments: Any) -> nn.Module:
    """Return a user's own network.

    Args:
        choice: a choice for which `is_own` is true.
        setting: name of the hyper-parameter, embedding or hypernetwork.
        arguments: the arguments of a function that builds the network, in order.
    """
    if isinstance(choice, nn.Module):
        return choice
    if isinstance(choice, str) and choice.endswith(GIVEN):
        name = choice.removesuffix(GIVEN)
        raise PefllError(
            f"the run needs the {setting} {name}, which was given in Python; pass it again, as in "
            f"pefll.load(path, {setting}={name}(...)) or pefll.fit(federation, {setting}={name}(...))",
            code="PEFLL-N535",
        )
    name = choice if isinstance(choice, str) else name_of(choice).removesuffix(GIVEN)
    function = import_name(choice, setting, setting=True) if isinstance(choice, str) else choice
    call = f"{name}({', '.join(arguments)})"
    if not callable(function) or isinstance(function, nn.Module):
        raise PefllError(
            f"the {setting} {name} is a {type(function).__name__}; it must be a function that is called as {call}",
            code="PEFLL-N536",
        )
    try:
        module = function(*arguments.values())
    except Exception as error:
        reason = fault(error).split("\n")[0] or first_line(error)
        raise PefllError(f"the {setting} {call} failed: {reason}", code="PEFLL-N537") from error
    if not isinstance(module, nn.Module):
        raise PefllError(
            f"the {setting} {call} returned {shown(module)}; it must return a torch.nn.Module", code="PEFLL-N538"
        )
    return module


class OwnEmbedding(nn.Module):
    """A user's embedding network, which takes samples and labels, or samples alone."""

    setting = "embedding"

    def __init__(
        self, net: nn.Module, input_shape: tuple[int, ...], classes: int, tokens: bool, encoded: bool = False
    ) -> None:
        super().__init__()
        self.net = net
        self.takes_labels = _takes_two(net)
        self.uses_labels = self.takes_labels and bool(getattr(net, "uses_labels", True))
        self.input_shape, self.classes, self.tokens = input_shape, classes, tokens
        self.encoded = encoded  # whether labels are numbers [b, classes]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map samples [b, ...], and labels [b] or encoded labels [b, classes], to [b, size]."""
        output: Tensor = self.net(x, y) if self.takes_labels else self.net(x)
        return output

    def example(self, which: int = 0) -> tuple[Tensor, ...]:
        """Return artificial samples [3, ...] and labels [3], or [3, classes]; each `which` gives others."""
        samples = [some_sample(self.input_shape, self.tokens, 3 * which + place) for place in range(3)]
        if self.encoded:
            return torch.cat(samples), (which + torch.arange(3.0 * self.classes)).view(3, self.classes).sin()
        return torch.cat(samples), (which + torch.arange(3)) % self.classes


class OwnHypernetwork(nn.Module):
    """A user's hypernetwork for descriptors of a size."""

    setting = "hypernetwork"

    def __init__(self, net: nn.Module, descriptor: int) -> None:
        super().__init__()
        self.net = net
        self.descriptor = descriptor

    def forward(self, v: Tensor) -> Tensor:
        """Map descriptors [c, l] to parameters [c, D]."""
        output: Tensor = self.net(v)
        return output

    def example(self) -> tuple[Tensor, ...]:
        """Return artificial descriptors [3, l]."""
        return (torch.arange(3.0 * self.descriptor).view(3, self.descriptor).sin(),)


def _takes_two(net: nn.Module) -> bool:
    """Return whether a module is called with samples and labels, and not with samples alone."""
    try:
        parameters = list(inspect.signature(net.forward).parameters.values())
    except (TypeError, ValueError):  # compiled code has no signature
        return True
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return True
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    # A second argument with a default is an option of the network, unless its name says that it is the label.
    return len(places) > 1 and (places[1].default is places[1].empty or places[1].name in ("y", "label", "labels"))


def width_of(
    net: nn.Module, input_shape: tuple[int, ...], classes: int, tokens: bool, encoded: bool = False
) -> int | None:
    """Return how many numbers a user's embedding network gives for a sample; None if it does not give [b, numbers]."""
    with randomness.initial_weights(0, "example"), torch.no_grad():
        try:
            module = copy.deepcopy(OwnEmbedding(net, input_shape, classes, tokens, encoded))
            output = module(*module.example())
        except Exception:  # noqa: BLE001 - `check_network` reports it
            return None
    return int(output.shape[1]) if isinstance(output, Tensor) and output.dim() == 2 else None


def check_network(network: Network, width: int, advice: str) -> None:
    """Raise PefllError unless a user's own network fits a run; other networks pass.

    It must map each row of its inputs to `width` numbers that depend on this row alone, without random numbers, and
    must have a gradient. Layers are checked by `Network`.

    Args:
        network: the network.
        width: wanted numbers of a row of the output.
        advice: what to do if the output has another width.
    """
    own = network.module
    if not isinstance(own, OwnEmbedding | OwnHypernetwork):
        return
    inputs = own.example()
    if inputs[0].is_meta:  # the memory is being estimated: tensors have no numbers
        return
    module = copy.deepcopy(network.module)
    name = f"the {own.setting} {type(own.net).__name__}"
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise PefllError(
                f"{name} has a parameter {key!r} of {parameter.dtype}; make all float32, with .float()",
                code="PEFLL-N539",
            )
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with randomness.initial_weights(0, "example"), torch.no_grad():
        given = tuple(each.clone() for each in inputs)
        try:
            output, again, one = module(*given), module(*inputs), module(*(each[:1] for each in inputs))
            evaluated = module.eval()(*inputs)
        except Exception as error:
            shapes = " and ".join(str(tuple(each.shape)) for each in inputs)
            raise PefllError(
                f"{name} does not accept inputs of shape {shapes}: {fault(error) or first_line(error)}",
                code="PEFLL-N540",
            ) from error
    for key, value in module.state_dict().items():
        if not torch.equal(value, before[key]):
            raise PefllError(
                f"{name} changes its parameter or buffer {key!r} when it is called; remove the code that does so",
                code="PEFLL-N541",
            )
    if not all(torch.equal(a, b) for a, b in zip(given, inputs, strict=True)):
        raise PefllError(f"{name} changes its input; write x = x - 1 instead of x -= 1", code="PEFLL-N542")
    if not isinstance(output, Tensor) or tuple(output.shape) != (3, width) or output.dtype != torch.float32:
        found = f"a {type(output).__name__}"
        if isinstance(output, Tensor):
            found = f"{output.dtype} of shape {tuple(output.shape)}"
        raise PefllError(
            f"{name} returns {found} for a batch of 3; it must be torch.float32 of shape {(3, width)}: {advice}",
            code="PEFLL-N543",
        )
    if torch.isnan(output).any():
        raise PefllError(
            f"{name} gives numbers that are NaN before any training; correct its weights and what its forward computes",
            code="PEFLL-N572",
        )
    if not torch.equal(output, again):
        raise PefllError(
            f"{name} gives different numbers for the same input; remove its random operations", code="PEFLL-N544"
        )
    if not alike(one, output[:1]) or not alike(evaluated, output):
        raise PefllError(
            f"{name} gives a row other numbers in another batch or after eval(); remove operations that mix rows or "
            "depend on the mode",
            code="PEFLL-N545",
        )
    try:
        theta = 0.2 * some_weights(network)
        pull_back(lambda at: network(at, *inputs), theta, torch.ones(3, width))
    except Exception as error:
        raise PefllError(
            f"the gradient of {name} cannot be computed: {fault(error) or first_line(error)}", code="PEFLL-N546"
        ) from error


def own_networks(method: object) -> dict[str, Network]:
    """Return a user's own networks in a method, by the names of their settings."""
    found = {}
    for value in vars(method).values():
        module = getattr(value, "module", None)
        if isinstance(module, OwnEmbedding | OwnHypernetwork):
            found[module.setting] = value
    return found


def probe(network: Network) -> list[float]:
    """Return the size of a user's own network, and a few numbers of its output for artificial weights.

    Files have no code. So these numbers tell another network from the one that a run was trained with.
    """
    assert isinstance(network.module, OwnEmbedding | OwnHypernetwork)
    with torch.no_grad():
        try:
            output = network(0.2 * some_weights(network), *network.module.example()).flatten()
        except Exception:  # noqa: BLE001 - a user's code may reject such weights
            return [network.size]
    values = output[torch.linspace(0, len(output) - 1, min(SHOWN, len(output))).long()]
    return [network.size, *(float(f"{value:.6g}") for value in values[values.isfinite()].tolist())]
