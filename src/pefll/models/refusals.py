"""What no model may have, as far as its layers and parameters show it: a sentence for each."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pefll.core.errors import PefllError


def refuse_changing_state(module: nn.Module) -> None:
    """Raise PefllError where a layer keeps statistics, draws random numbers or mixes samples while it trains."""
    for name, layer in module.named_modules():
        where = _where(name, layer)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(layer, "track_running_stats", False):
            raise PefllError(
                f"{where} keeps statistics of batches, which no hypernetwork can generate; use GroupNorm or LayerNorm",
                code="PEFLL-N028",
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise PefllError(
                f"{where} draws its own random numbers, so runs would not repeat; set its p to 0", code="PEFLL-N029"
            )
        for option in ("sparse", "scale_grad_by_freq"):
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and getattr(layer, option):
                raise PefllError(
                    f"{where} has gradients that clients cannot compute side by side; set its {option} to False",
                    code="PEFLL-N030",
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
                    "torch.zeros(1, *input_shape), before you give it",
                    code="PEFLL-N031",
                )
            if value.is_complex() and value.requires_grad:
                raise PefllError(
                    f"{where} has a complex parameter {key!r}; make it a real one with one more axis of length 2, and "
                    "torch.view_as_complex of it where it is used",
                    code="PEFLL-N032",
                )
        for key, value in vars(layer).items():
            held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            if not key.startswith("_") and any(isinstance(one, nn.Module) and one not in known for one in held):
                raise PefllError(
                    f"{_where(name, layer)} has layers in a plain {type(value).__name__}, {key!r}, where nobody trains "
                    "them; use nn.ModuleList or nn.ModuleDict",
                    code="PEFLL-N033",
                )


def copied(module: nn.Module) -> nn.Module:
    """Return a copy to run in the place of a module, whose code may keep what it computes: attention, for a picture.

    It has the module's own parameters and buffers, which are not copied. A module that holds something computed can be
    copied no more.
    """
    for name, layer in module.named_modules():
        for key, value in vars(layer).items():
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise PefllError(
                    f"{_where(name, layer)} holds {key!r}, which was computed, so that it cannot be copied: give a "
                    "model that was not used yet; in place of torch.nn.utils.weight_norm take the one in "
                    "torch.nn.utils.parametrizations",
                    code="PEFLL-N034",
                )
    return copy.deepcopy(module, tensors_of(module))


def tensors_of(module: nn.Module) -> dict[int, object]:
    """Return what `copy.deepcopy` takes, so that a module's copy has the same parameters and buffers."""
    return {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}


def _where(name: str, layer: nn.Module) -> str:
    return f"layer {name!r} ({type(layer).__name__})" if name else f"the model {type(layer).__name__}"
