"""When steps are recorded, and what is let be meanwhile; that they are the same steps is tested with the engines."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from pefll.backend import recorded
from pefll.backend.optim import sgd_on_gpu
from pefll.methods.optim import SGD, sgd_on_loss


def test_no_garbage_is_collected_while_a_graph_is_recorded(monkeypatch):
    """A graph that is freed during a recording breaks it; here without a GPU, on one in test_cuda.py."""
    seen = []

    @contextmanager
    def graph(*_, **__):
        seen.append(gc.isenabled())
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(ZeroDivisionError), recorded.capture(None, None):
        seen.append(1 / 0)
    assert seen == [False]
    assert gc.isenabled()


def test_when_steps_are_recorded(monkeypatch):
    """What is asked of the device is made up here: streams that are not the default one, and nobody who records."""
    value = torch.zeros(2)
    asked = {"is_current_stream_capturing": lambda: False, "current_stream": lambda _: "own", "default_stream": str}
    for name, answer in asked.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    worth = recorded.worth_capturing
    assert worth(value, recorded.MIN_REPETITIONS)
    assert not worth(value, recorded.MIN_REPETITIONS - 1)
    with recorded.warm_up():
        assert not worth(value, recorded.MIN_REPETITIONS)
    inside = []

    def ask(x):
        inside.append(worth(x, recorded.MIN_REPETITIONS))
        return x.sum()

    torch.vmap(ask)(torch.zeros(3, 2))
    torch.func.grad(ask)(value)
    torch.vmap(torch.func.grad(ask))(torch.zeros(3, 2))
    assert inside == [True, False, False]
    assert not worth(value.requires_grad_(), recorded.MIN_REPETITIONS)
    with torch.no_grad():
        assert worth(value, recorded.MIN_REPETITIONS)
        monkeypatch.setattr(torch.cuda, "current_stream", str)
        assert not worth(value, recorded.MIN_REPETITIONS)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "own")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not worth(value, recorded.MIN_REPETITIONS)


def test_a_warm_up_has_the_first_steps_only(monkeypatch):
    batches = list(range(50))
    assert list(recorded.few_in_warm_up(batches)) == batches
    with recorded.warm_up():
        assert list(recorded.few_in_warm_up(batches)) == [0, 1, 2, 3]
        assert list(recorded.few_in_warm_up(batches[:2])) == [0, 1]
        with pytest.raises(ZeroDivisionError), recorded.warm_up():
            raise ZeroDivisionError
        assert len(list(recorded.few_in_warm_up(iter(batches)))) == recorded.WARM_UP_STEPS
    assert list(recorded.few_in_warm_up(batches)) == batches


def test_a_client_takes_few_steps_in_a_warm_up():
    def loss(theta, batch):
        return ((theta - batch) ** 2).sum()

    theta, batches = torch.zeros(3), [torch.full((3,), float(i)) for i in range(9)]
    whole = sgd_on_loss(loss, theta, batches, SGD(0.1))
    few = sgd_on_loss(loss, theta, batches[: recorded.WARM_UP_STEPS], SGD(0.1))
    assert not torch.equal(whole, few)
    mapped = torch.vmap(lambda theta: sgd_on_gpu(torch.func.grad(loss), theta, batches, SGD(0.1)))
    with recorded.warm_up():
        torch.testing.assert_close(mapped(theta.expand(2, 3))[0], few)
    torch.testing.assert_close(mapped(theta.expand(2, 3))[0], whole)
