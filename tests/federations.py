"""Small federations for tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.samples import Normalise, Samples
from pefll.methods import Problem
from pefll.models import Network, build_model


def ragged(
    clients: int = 8,
    shape: tuple[int, ...] = (6,),
    classes: int = 3,
    sizes: tuple[int, ...] = (1, 3, 5, 9, 40),
    seen: int | None = None,
    seed: int = 0,
    pixels: bool = False,
) -> Federation:
    """Clients of different sizes, some smaller than any batch, with classes that can be told apart."""
    rng = np.random.default_rng(seed)
    owner, split, y = [], [], []
    for client in range(clients):
        count = sizes[client % len(sizes)]
        for number, amount in ((0, count), (1, 1 + count // 3), (2, 1 + count // 2)):
            owner += [client] * amount
            split += [number] * amount
            y += list(rng.integers(0, classes, amount))
    labels = np.array(y)
    centres = np.random.default_rng(7).normal(size=(classes, *shape))
    x = centres[labels] + rng.normal(size=(len(labels), *shape))
    if pixels:
        x = np.clip(128 + 40 * x, 0, 255).astype(np.uint8)
    samples = Samples(
        x=x,
        y=labels,
        classes=classes,
        normalise=Normalise((0.5,) * shape[0], (0.25,) * shape[0]) if pixels else None,
    )
    return assemble(
        samples, np.array(owner), np.array(split, dtype=np.int8), clients - 2 if seen is None else seen, "ragged"
    )


def problem_of(federation: Federation, model: str | nn.Module = "mlp") -> Problem:
    module = build_model(model, federation.input_shape, federation.classes) if isinstance(model, str) else model
    network, shape, classes = Network(module), federation.input_shape, federation.classes
    return Problem(network, shape, classes, federation.num_clients, num_seen=federation.num_seen)


def flat(tree: object) -> torch.Tensor:
    from pefll.core.tree import leaves

    return torch.cat([leaf.reshape(-1).double().cpu() for leaf in leaves(tree)])
