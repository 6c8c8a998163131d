"""Federations whose labels are numbers or sets."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pefll.data.federation import Federation
from tests.federations import ragged

SIZES = (2, 5, 9, 14)


def with_numbers(columns: int = 2, **settings: Any) -> Federation:
    """Clients whose labels are linear in the samples, with another slope for each client."""
    data = ragged(**{"sizes": SIZES} | settings)
    slopes = torch.linspace(-1, 1, data.x[0].numel() * columns).reshape(-1, columns)
    y = 50 + 20 * data.x.flatten(1) @ slopes
    return dataclasses.replace(data, y=y[:, 0].contiguous() if columns == 1 else y, classes=0)


def with_sets(columns: int = 2, **settings: Any) -> Federation:
    """Clients whose labels are the sets of features above 0."""
    data = ragged(**{"sizes": SIZES} | settings)
    return dataclasses.replace(data, y=(data.x.flatten(1)[:, :columns] > 0).long(), classes=0)
