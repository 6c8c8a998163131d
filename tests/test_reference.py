"""Faster versions stand in for plain functions where they may, and compute the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import pefll
from pefll.core import reference as references
from pefll.core.reference import fast, reference
from pefll.methods.contract import Problem
from pefll.methods.optim import SGD, sgd_along, sgd_on_loss
from pefll.models import Network
from pefll.tasks import Classification


@reference
def double(x, times=2):
    """Multiply."""
    return times * x


def test_the_first_version_that_may_stands_in():
    asked = []
    fast(double, when=lambda x, times=2: x < 0)(lambda x, times=2: ("negative", x, times))
    fast(double, when=lambda x, times=2: asked.append(x) or x > 9)(lambda x, times=2: ("large", x, times))
    assert double(3) == 6
    assert double(-1) == ("negative", -1, 2)
    assert double(x=10, times=3) == ("large", 10, 3)  # by position or by name
    assert asked == [3, 10]
    assert double.__wrapped__(-1) == -2
    assert double.__doc__ == "Multiply."


def test_every_reference_of_the_package_has_a_faster_version():
    ours = [one for one in references.references() if one.__module__.startswith("pefll.")]
    assert len(ours) >= 14
    assert [one.__qualname__ for one in ours if not references.versions_of(one)] == []


class Squares(Classification):
    """A loss of one's own: cross-entropy, squared."""

    def loss(self, output, y):
        return super().loss(output, y).square()


@pytest.mark.parametrize("task", [Classification(3), Squares(3)])
@pytest.mark.parametrize("steps", [None, 2])
def test_one_client_alone_and_mapped_does_what_the_plain_functions_do(task, steps):
    problem = Problem(Network(torch.nn.Linear(4, 3)), (4,), 3, 1, task=task)
    theta = problem.model.init(0, "model").double()
    rng = torch.Generator().manual_seed(0)
    batches = [
        pefll.data.client.Batch(
            torch.randn(5, 4, generator=rng).double(),
            torch.randint(3, (5,), generator=rng),
            torch.tensor([1.0, 1, 1, 1, 0]).double(),
        )
        for _ in range(3)
    ]
    sgd, count = SGD(0.1, 0.9, 0.01, 0.5), None if steps is None else torch.tensor(steps)
    plain = sgd_along.__wrapped__(torch.func.grad(problem.loss), theta, batches, sgd, count)
    torch.testing.assert_close(sgd_on_loss(problem.loss, theta, batches, sgd, count), plain)
    mapped = torch.vmap(lambda at: sgd_on_loss(problem.loss, at, batches, sgd, count))(theta[None])
    torch.testing.assert_close(mapped[0], plain)


def test_without_the_backend_everything_still_works():
    code = """
import numpy as np, pefll
from pefll.core import reference
assert not any(map(reference.versions_of, reference.references()))
rng = np.random.default_rng(0)
client = np.repeat(np.arange(8), 20)
data = pefll.federation_from_arrays(rng.normal(size=(160, 5)), rng.integers(0, 3, 160), client)
for engine in ("serial", "vector"):
    run = pefll.fit(data, pefll.PeFLL(local_steps=2), rounds=2, engine=engine, processes=1, device="cpu")
    assert run.evaluate().seen is not None
"""
    environment = {"PEFLL_KERNELS": "0", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
