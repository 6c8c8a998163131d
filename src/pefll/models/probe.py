"""Fingerprint of a model's forward pass: its scores for made-up weights and a made-up sample.

A run stores weights but not code. A module given in Python may have another nonlinearity, other buffers or other frozen
weights than the trained one, and the stored weights would still fit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.models.network import Network

TOLERANCE = 1e-3  # relative to the largest score: processors and versions of torch round differently
# Scale of the weights and precision. Large weights tell ReLU from ReLU6, for example. They amplify rounding, so the
# scores need double precision to be equal on every processor.
SCALES = {0.2: torch.float32, 20.0: torch.float64}


def probe(network: Network, input_shape: tuple[int, ...], tokens: bool) -> list[list[float | None]]:
    """Return the scores of one sample with small and with large weights; None for scores that are not finite.

    Args:
        network: the client model.
        input_shape: of a sample.
        tokens: whether samples are tokens.
    """
    sample, rows = some_sample(input_shape, tokens), []
    for scale, dtype in SCALES.items():
        weights = (scale * some_weights(network)).to(dtype)
        rows.append(_scores(network, weights, sample if tokens else sample.to(dtype)))
    return rows


def _scores(network: Network, weights: Tensor, sample: Tensor) -> list[float | None]:
    try:
        with torch.no_grad():
            scores = network(weights, sample)[0].tolist()
    except Exception:  # noqa: BLE001 - a user's code may reject such inputs
        return []
    return [float(f"{score:.6g}") if math.isfinite(score) else None for score in scores]


def some_weights(network: Network, which: int = 0) -> Tensor:
    """Return made-up weights [D] between -1 and 1; different ones for each `which`."""
    return torch.arange(1.0, network.size + 1).double().add(which).sin().float()


def some_sample(input_shape: tuple[int, ...], tokens: bool, which: int = 0) -> Tensor:
    """Return one made-up sample [1, ...]; a different one for each `which`."""
    numbers = torch.arange(torch.Size(input_shape).numel()).view(1, *input_shape)
    if tokens:
        return (numbers + which) % 2  # every vocabulary has the tokens 0 and 1
    # Between 0 and 1: valid as pixels, as features and, rounded down, as indices of words.
    return 0.99 * numbers.double().mul(0.7).add(which).sin().abs().float()


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Return whether scores of any shape are equal up to rounding."""
    finite = wanted[wanted.isfinite()]
    near = max(1e-6, TOLERANCE * float(finite.abs().max())) if len(finite) else 0.0
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=near, equal_nan=True)


def check_same_model(trained: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Raise PefllError for a model that is not the one a run was trained with.

    Args:
        trained: facts of the run; earlier versions stored neither weights nor probe.
        found: facts of this model: its number of weights and its probe.
        where: the run.
    """
    if not trained.get("probe") or "weights" not in trained:
        return
    if trained["weights"] != found["weights"]:
        raise PefllError(
            f"{where} was trained with another model: it has {trained['weights']:,} weights, and this one "
            f"{found['weights']:,}",
            code="PEFLL-N026",
        )
    if not all(alike(_read(row), _read(wanted)) for row, wanted in zip(found["probe"], trained["probe"], strict=True)):
        raise PefllError(
            f"{where} was trained with another model: with the same weights this one gives other scores; give the "
            "same layers, buffers and frozen parameters, and fix the seed if they are random",
            code="PEFLL-N027",
        )


def _read(row: list[float | None]) -> Tensor:
    return torch.tensor([math.nan if score is None else score for score in row])
