"""A few small clients, and what methods are checked against: their losses and gradients without our client code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pefll.data.client import Batch
from pefll.data.samples import TRAIN
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import Problem, build_method
from tests.federations import problem_of, ragged

both_engines = pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
PLAIN = {"client_momentum": 0.0, "client_clip": 0.0, "weight_decay": 0.0}
SIZES = (2, 7, 30, 11)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


def clients_of(seen: int = 3, clients: int = 4, sizes=SIZES):
    return ragged(clients=clients, sizes=sizes, seen=seen)


def opened(make, name, settings, federation=None, model=None, c=3, seed=0):
    federation = federation or clients_of()
    method = build_method(name, problem_of(federation, model or two_layers()), settings)
    return make(federation, method, seed=seed, clients_per_round=c, dtype=torch.float64)


def loss_of(engine, client: int, theta: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy on all training samples of a client, without any of our client code."""
    federation = engine.federation
    rows = federation.indices(client, TRAIN)
    return F.cross_entropy(engine.method.problem.model(theta, federation.x[rows].double()), federation.y[rows])


def grad(engine, client: int, theta: torch.Tensor) -> torch.Tensor:
    leaf = theta.detach().clone().requires_grad_()
    return torch.autograd.grad(loss_of(engine, client, leaf), leaf)[0]


def batches_asked_for(patch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches for which a serial engine's clients ask for the problem's loss, from now on."""
    asked: list[Batch] = []

    def recording(ask):
        def recorded(self, theta, batch):
            asked.append(batch)
            return ask(self, theta, batch)

        return recorded

    patch.setattr(Problem, "loss", recording(Problem.loss))
    return asked


def samples_in(federation, batch: Batch) -> frozenset[int]:
    """Which samples a batch has, as rows of the federation, found by what they look like."""
    found = (federation.x.double()[:, None] == batch.x.double()[None]).all(dim=-1)
    assert (found.sum(dim=0) == 1).all()  # no two samples look the same
    return frozenset(found.int().argmax(dim=0).tolist())


def grad_on(engine, batch: Batch, theta: torch.Tensor) -> torch.Tensor:
    leaf = theta.detach().clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(engine.method.problem.model(leaf, batch.x), batch.y), leaf)[0]


def weighted(models) -> torch.Tensor:
    return (2 * models[0] + 7 * models[1] + 30 * models[2]) / 39


def models_of(engine, server) -> dict[int, torch.Tensor]:
    models = {}
    with torch.no_grad():
        for ids, cohort in engine.cohorts(np.arange(engine.federation.num_clients)):
            models |= dict(zip(ids.tolist(), engine.method.personalize(server, cohort).clone(), strict=True))
    return models
