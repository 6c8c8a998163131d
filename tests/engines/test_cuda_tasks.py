"""Tasks, losses, schedules and networks of a user's own, trained on a GPU. Everywhere else these tests are skipped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import pefll
from pefll.core.tree import leaves
from tests.federations import ragged
from tests.models.own_networks import Embedding, hypernetwork
from tests.tasks.labels import with_numbers, with_sets

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FEW = {"rounds": 4, "eval_every": 2, "clients_per_round": 3, "local_steps": 3, "batch_size": 4}


def focal(scores, y):
    p = scores.softmax(dim=1).gather(1, y[:, None]).squeeze(1)
    return -((1 - p) ** 2) * p.log()


@dataclass(frozen=True)
class Quantile(pefll.BaseTask):
    q: float = 0.9
    outputs = 1

    def loss(self, output, y):
        return torch.maximum(self.q * (y - output[:, 0]), (self.q - 1) * (y - output[:, 0]))


NEAR = pefll.Metric("within_ten", lambda output, y: (output[:, 0] - y).abs() < 10, bounds=(0, 1))
TASKS = {
    "regression": (lambda: with_numbers(1), pefll.Regression(extra=[NEAR])),
    "huber": (with_numbers, pefll.Regression(loss_name="huber", delta=0.5)),
    "multilabel": (with_sets, pefll.MultiLabel(extra=["auc"])),
    "own loss": (ragged, pefll.Classification(own_loss=focal)),
    "smoothing": (ragged, pefll.Classification(label_smoothing=0.1, extra=["macro_f1", "auc", "calibration_error"])),
    "own task": (lambda: with_numbers(1), Quantile(q=0.75)),
}


def states_and_figures(federation, method, **settings):
    """Train with the serial engine on a CPU and with recorded rounds on a GPU; return states and figures of both."""
    states, figures = [], []
    for place in ({"engine": "serial", "device": "cpu", "processes": 1}, {"device": "cuda"}):
        run = pefll.fit(federation, method, **settings, **place, precision="float64")
        states.append([leaf.double().cpu() for leaf in leaves(run.final) if leaf.is_floating_point()])
        figures.append([value for group in run.evaluate().rows().values() for value in group.values()])
    return states, np.array(figures, dtype=float)


@pytest.mark.parametrize("method", ["pefll", "fedavg"])
@pytest.mark.parametrize("name", TASKS)
def test_a_gpu_trains_a_task_as_a_cpu_does(name, method):
    make, task = TASKS[name]
    states, figures = states_and_figures(make(), method, task=task, lr_schedule="cosine 0.1", **FEW)
    for mine, other in zip(*states, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(*figures, rtol=1e-5)


NETWORKS = {
    "own embedding network": {"embedding": lambda shape, classes, size: Embedding(shape, classes, size)},
    "own hypernetwork": {"hypernetwork": hypernetwork},
    "chunked": {"hypernetwork": "chunked"},
    "low-rank": {"hypernetwork": "low-rank"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_gpu_trains_networks_of_a_users_own_as_a_cpu_does(name):
    states, figures = states_and_figures(ragged(), "pefll", seed=3, **NETWORKS[name], **FEW)
    for mine, other in zip(*states, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(*figures, rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_regression_learns_in_every_precision(precision):
    federation = with_numbers(1, clients=20, sizes=(40,))
    settings = {"rounds": 150, "eval_every": 50, "clients_per_round": 5, "local_steps": 10, "client_lr": 0.02}
    run = pefll.fit(
        federation,
        "pefll",
        task=pefll.Regression(),
        lr_schedule="cosine",
        device="cuda",
        precision=precision,
        **settings,
    )
    assert run.evaluate().unseen.r2 > 0.8
