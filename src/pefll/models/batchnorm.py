"""Replaces batch normalisation, whose statistics of batches no hypernetwork can generate."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.parameter import is_lazy

from pefll.core.errors import PefllError, first_line
from pefll.core.warning import warn
from pefll.core.wording import counted, first_few

# With fewer channels in a group, a group's statistics say too much about single channels.
LEAST_CHANNELS = 8
MOST_GROUPS = 32  # as in "Group Normalization" (Wu and He, 2018)


def replace_batchnorm(model: nn.Module) -> nn.Module:
    """Return a copy of a model with GroupNorm in place of batch normalisation; a warning names the replaced layers.

    Weights and biases are carried over, running means and variances are lost. So the copy gives other outputs than the
    model until it is trained. The model itself does not change. Layers inside other modules are replaced too, and so
    are instance normalisations that keep running statistics.

    Raises:
        PefllError: if the model is no `nn.Module`, or has a layer without an equivalent GroupNorm.
    """
    if not isinstance(model, nn.Module):
        raise PefllError(
            f"replace_batchnorm takes a torch.nn.Module, not a {type(model).__name__}; pass a model", code="PEFLL-N530"
        )
    if any(is_lazy(value) for value in (*model.parameters(), *model.buffers())):
        raise PefllError(
            f"the model {type(model).__name__} does not know all its shapes yet; first call it on an example",
            code="PEFLL-N532",
        )
    try:
        model = copy.deepcopy(model)
    except Exception as error:
        raise PefllError(
            f"the model {type(model).__name__} cannot be copied: {first_line(error)}; pass a freshly built model",
            code="PEFLL-N534",
        ) from error
    # The same layer may be in several places: all of them get the same replacement.
    found = {layer: name for name, layer in model.named_modules() if keeps_statistics(layer)}
    replacements = {layer: _group_norm(name, layer) for layer, name in found.items()}
    for parent in list(model.modules()):
        for key, layer in parent._modules.items():
            if layer in replacements:
                parent._modules[key] = replacements[layer]
    layers = first_few(
        f"{name or 'the model'} ({counted(norm.num_channels, 'channel')}, {counted(norm.num_groups, 'group')})"
        for name, norm in zip(found.values(), replacements.values(), strict=True)
    )
    sentence = f"{counted(len(found), 'layer')} replaced by GroupNorm: {layers}" if found else "no layer to replace"
    warn(f"replace_batchnorm: {sentence}")
    return replacements.get(model, model)


def keeps_statistics(layer: nn.Module) -> bool:
    """Return whether a layer keeps or uses statistics of batches."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) or bool(getattr(layer, "track_running_stats", False))


def _group_norm(name: str, layer: nn.Module) -> nn.GroupNorm:
    """Return the GroupNorm that stands in for a layer; `name` is the layer's name in the model."""
    where = f"layer {name!r} ({type(layer).__name__})" if name else f"the model {type(layer).__name__}"
    if not isinstance(layer, nn.modules.batchnorm._NormBase):
        raise PefllError(
            f"{where} keeps statistics of batches and has no equivalent GroupNorm; replace it by hand",
            code="PEFLL-N531",
        )
    channels = layer.num_features
    if isinstance(layer, nn.BatchNorm1d) and channels == 1:
        raise PefllError(
            f"{where} has one channel, and a GroupNorm would make each of its numbers 0; remove the layer",
            code="PEFLL-N533",
        )
    norm = nn.GroupNorm(_groups(layer), channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        # The parameters themselves, with their device, type and `requires_grad`.
        norm.weight, norm.bias = layer.weight, layer.bias
    return norm.train(layer.training)


def _groups(layer: nn.modules.batchnorm._NormBase) -> int:
    """Return the number of groups: as many as there are channels for an instance norm, one for features."""
    channels = layer.num_features
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return channels  # a group of one channel is what an instance norm normalises
    if isinstance(layer, nn.BatchNorm1d):
        return 1  # features [b, channels] have one number per channel; small groups would keep only their signs
    most = max(1, min(MOST_GROUPS, channels // LEAST_CHANNELS))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)
