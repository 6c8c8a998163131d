"""A model that cannot be mapped over clients is said to be one, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pefll.core.errors import PefllError
from pefll.training.fitting import fit
from tests.federations import ragged


class Asking(nn.Linear):
    """A model whose code does with numbers what cannot be done for several clients at once."""

    def __init__(self, what: str) -> None:
        super().__init__(6, 3)
        self.what = what
        self.memory = nn.GRU(6, 6, batch_first=True) if what == "rule" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        if self.what == "value":
            return z if float(z.detach().sum()) < torch.inf else -z
        if self.what == "shape":
            return z + x[:, (x < torch.inf).all(0)].sum(1, keepdim=True)
        if self.memory is not None:
            return z + self.memory(x[:, None])[0].sum((1, 2))[:, None]
        if len(x) > 4:
            raise ValueError("too many")
        return z


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("value", r"reads a tensor's value.*test_mapping\.py, line \d+\); use engine='serial'"),
        ("shape", "the shape of a tensor depends on values"),
        ("rule", "torch has no rule for aten::gru.input"),
    ],
)
def test_a_model_that_cannot_be_mapped_is_said_to_be_one(what, sentence):
    federation = ragged(clients=4, sizes=(9, 12))
    settings = {"rounds": 1, "clients_per_round": 2, "local_steps": 1}
    with pytest.raises(PefllError, match=f"cannot map the model Asking over clients, because.*{sentence}.*PEFLL-E009"):
        fit(federation, "fedavg", model=Asking(what), engine="vector", **settings)
    fit(federation, "fedavg", model=Asking(what), engine="serial", processes=1, **settings)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_mapping_is_not_blamed_for_what_fails_anyway(engine):
    with pytest.raises(ValueError, match="too many"):
        fit(ragged(clients=4, sizes=(9, 12)), "fedavg", model=Asking(""), engine=engine, processes=1, rounds=1)


class Strided(nn.Module):
    """Reads what a convolution gives as it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y.as_strided((len(y), 16), (y[0].numel(), 1)))


def test_a_model_that_would_be_mapped_wrongly_is_refused():
    federation = ragged(shape=(1, 8, 8))
    settings = {"rounds": 1, "local_steps": 1, "clients_per_round": 2, "processes": 1}
    with pytest.raises(
        PefllError, match=r"cannot map the model Strided .* mapping changes its scores.*engine='serial'.*PEFLL-E010"
    ):
        fit(federation, "fedavg", model=Strided(), engine="vector", **settings)
    assert fit(federation, "fedavg", model=Strided(), engine="serial", **settings).summary["rounds"] == 1
