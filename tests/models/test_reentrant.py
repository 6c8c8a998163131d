"""Networks, and what records them, are used by threads at once, or within themselves."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

from pefll.backend.fused import fused
from pefll.engines.hardware import forward_flops
from pefll.methods import Problem
from pefll.models import Network
from pefll.models.head import last_linear
from tests.at_once import both, in_a_thread

meeting: Callable[[], Any] | None = None


@torch.fx.wrap
def meet(x):
    """Return x, once whoever it is that is met has come too; a function that a record of a network keeps."""
    if meeting is not None:
        meeting()
    return x


class Meeting(nn.Module):
    """A network that meets others of other threads between its layers."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.last, self.plain = nn.Linear(6, 4), nn.Linear(4, 3), plain
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        if self.plain and bool((x > 1e9).any()):  # looks at the numbers, so that it cannot be recorded
            return x
        return meet(self.last(meet(F.relu(self.first(x))))) + self.shift


@pytest.fixture
def met(monkeypatch):
    """Let two threads meet."""
    barrier = threading.Barrier(2, timeout=30)
    return lambda wait=barrier.wait: monkeypatch.setattr("tests.models.test_reentrant.meeting", wait)


@pytest.mark.parametrize("plain", [False, True])
def test_two_threads_call_a_network_with_different_weights(plain, met):
    network, x = Network(Meeting(plain)), torch.randn(5, 6)
    thetas = [network.init(seed, "model") for seed in range(2)]
    alone = [network(theta, x) for theta in thetas]
    kept = {name: value.clone() for name, value in network.module.state_dict().items()}
    met()
    together = both(lambda number: network(thetas[number], x))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert all(torch.equal(value, network.module.state_dict()[name]) for name, value in kept.items())


def test_a_network_is_called_within_itself_and_under_transforms(met):
    network, x = Network(Meeting(plain=False)), torch.randn(5, 6)
    thetas = torch.stack([network.init(seed, "model") for seed in range(3)])
    outer, inner = network(thetas[0], x), network(thetas[1], x)
    seen = []

    def again() -> None:
        met(None)
        seen.append(network(thetas[1], x))

    met(again)
    assert torch.equal(network(thetas[0], x), outer)
    assert torch.equal(seen[0], inner)
    met(again)  # a second copy is there by now, and its numbers are ordinary ones, under whatever it was made
    mapped = torch.vmap(torch.func.grad(lambda theta: network(theta, x).square().sum()))(thetas)
    met(None)
    by_hand = torch.func.grad(lambda theta: network(theta, x).square().sum())(thetas[2])
    torch.testing.assert_close(mapped[2], by_hand)


def test_a_copy_that_is_made_while_others_are_mapped_has_ordinary_tensors(met):
    class Scaled(Meeting):
        def __init__(self) -> None:
            super().__init__(plain=True)
            self.factor = torch.full((3,), 2.0)  # not a buffer: copied with the module

        def forward(self, x):
            return self.last(meet(self.first(x))) * self.factor

    network, x = Network(Scaled()), torch.randn(5, 6)
    thetas = torch.stack([network.init(seed, "model") for seed in range(3)])

    def again() -> None:
        met(None)
        network(thetas[1], x)

    met(again)
    torch.vmap(torch.func.grad(lambda theta: network(theta, x).sum()))(thetas)
    expected = network(thetas[0], x)
    met(again)
    assert torch.equal(network(thetas[0], x), expected)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(one.module.factor) for one in network._idle)


def test_a_network_that_was_used_can_be_copied_and_sent():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    network, x = Network(Keeps(6, 3)), torch.randn(2, 6)
    theta = network.init(0, "model").requires_grad_()
    expected = network(theta, x)
    assert torch.equal(copy.deepcopy(network)(theta, x), expected)
    linear = Network(nn.Linear(6, 3))
    linear(theta, x)
    assert torch.equal(pickle.loads(pickle.dumps(linear))(theta, x), expected)


def test_a_failing_network_names_the_users_line_with_the_weights_of_the_call():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    network = Network(Picky())
    theta = network.init(0, "model").double()
    with pytest.raises(RuntimeError, match=r"5x7.*6x3"):  # and nothing of types: the weights are the call's
        network(theta, torch.zeros(5, 7, dtype=torch.float64))
    assert network(theta, torch.zeros(5, 6, dtype=torch.float64)).dtype == torch.float64


def test_modules_of_other_threads_compute_while_one_is_recorded(met):
    """torch replaces `nn.Module.__call__` in the whole process meanwhile."""
    other, x = nn.Sequential(nn.Linear(6, 3), nn.ReLU()), torch.randn(2, 6)
    expected, found = other(x), []
    for record in (fused, last_linear):
        met(lambda: found.append(in_a_thread(lambda: other(x))))

        class Waits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(6, 3)

            def forward(self, x):
                if meeting is not None:
                    meeting()
                return self.layer(x)

        record(Waits())
        met(None)
    assert len(found) == 2
    assert all(torch.equal(each, expected) for each in found)


def test_two_recordings_at_once_leave_torch_as_it_was():
    call, get = nn.Module.__call__, nn.Module.__getattr__

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            time.sleep(0.05)
            return F.relu(self.layer(x))

    def one(number: int) -> nn.Module:
        time.sleep(0.02 * number)
        module = Slow()
        return fused(module) is not module

    try:
        assert both(one) == [True, True]
        assert (nn.Module.__call__, nn.Module.__getattr__) == (call, get)
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = call, get


def test_counting_operations_hooks_into_nobodys_modules(monkeypatch):
    hooks = []
    monkeypatch.setattr(Meeting, "forward", lambda self, x: hooks.append(bool(_global_hooks())) or self.first(x))
    assert forward_flops(Problem(Network(Meeting(plain=True)), (6,), 3, 1)) == 2 * 32 * 6 * 4
    assert not any(hooks)


def _global_hooks() -> dict[int, Any]:
    return torch_module._global_forward_pre_hooks | torch_module._global_forward_hooks
