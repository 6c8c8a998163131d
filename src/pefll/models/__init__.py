"""Client models, embedding networks and hypernetworks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pefll.core import randomness
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.plugins import fault, import_name
from pefll.models.batchnorm import replace_batchnorm
from pefll.models.check import check_model
from pefll.models.convnet import ConvNet, lenet, small_cnn
from pefll.models.embedding import EMBEDDINGS, LENET_SIDE, build_embedding
from pefll.models.hypernetwork import HIDDEN_LAYERS, Hypernetwork
from pefll.models.lstm import CharLSTM
from pefll.models.mlp import MLP, tiny_mlp
from pefll.models.network import Network
from pefll.models.resnet import ResNet20

__all__ = [
    "EMBEDDINGS",
    "HIDDEN_LAYERS",
    "MLP",
    "MODELS",
    "CharLSTM",
    "ConvNet",
    "Hypernetwork",
    "Network",
    "ResNet20",
    "build_embedding",
    "build_model",
    "check_model",
    "lenet",
    "replace_batchnorm",
    "resolve_model",
    "small_cnn",
    "weights_of",
]

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "lenet": lenet,
    "cnn": small_cnn,
    "resnet20": ResNet20,
    "mlp": MLP,
    "tiny": tiny_mlp,
    "lstm": CharLSTM,
}


def resolve_model(name: str, input_shape: tuple[int, ...], tokens: bool = False) -> str:
    """Return a model's name. `"auto"` becomes lstm for text, lenet or cnn for images by size, and mlp otherwise."""
    if name != "auto":
        return name
    if tokens:
        return "lstm"
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        return "mlp"
    return "lenet" if min(input_shape[1:]) >= LENET_SIDE else "cnn"


def build_model(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a client model for samples of `input_shape`.

    The name is a key of MODELS, `"auto"` or `"package.module:function"`. Such a function takes (input_shape, classes)
    and returns an `nn.Module`.
    """
    name = resolve_model(name, input_shape)
    # Some weights are drawn only here. So torch's generator is seeded before, and restored afterwards.
    with randomness.initial_weights(0, "model"):
        if ":" in name:
            return _import_model(name, input_shape, classes)
        if name not in MODELS:
            raise unknown("model", name, ["auto", *MODELS, "your.module:function"])
        return MODELS[name](input_shape, classes)


def weights_of(name: str, input_shape: tuple[int, ...], classes: int) -> dict[str, Tensor]:
    """Return the weights of a model by name, on the meta device: they have shapes and types but use no memory."""
    with torch.device("meta"):
        return dict(build_model(name, input_shape, classes).state_dict())


def _import_model(reference: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    function = import_name(reference, "model")
    if not callable(function) or isinstance(function, nn.Module):
        raise PefllError(
            f"{reference} is not a function of (input_shape, classes), but a {type(function).__name__}",
            code="PEFLL-N001",
        )
    try:
        model = function(input_shape, classes)
    except Exception as error:
        reason = fault(error).split("\n")[0] or first_line(error)
        raise PefllError(f"{reference}(input_shape, classes) failed: {reason}", code="PEFLL-N002") from error
    if not isinstance(model, nn.Module):
        raise PefllError(f"{reference} returned a {type(model).__name__}, not a torch.nn.Module", code="PEFLL-N003")
    return model
