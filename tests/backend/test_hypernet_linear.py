"""The kernels of a hypernetwork's last layer against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pefll.backend import client_axis, hypernet_linear, precision
from pefll.backend.blocks import linear_block
from pefll.core.derivatives import network_vjp
from pefll.core.errors import PefllError
from pefll.models import Network
from pefll.models.hypernetwork import Hypernetwork
from tests.backend.test_kernels import DEVICE, EXAMPLES, both, close, interpreter, products, random  # noqa: F401 (fixtures)

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see test_kernels.py


def within():
    """Products of bfloat16 runs are those of TF32 here, which the interpreter does not round to."""
    return 3e-3 if precision.current() == "bf16" and DEVICE == "cuda" else 1e-5


@pytest.mark.usefixtures("products")
@EXAMPLES
@given(
    rows=st.sampled_from([1, 5, 16, 17, 50]),
    inputs=st.sampled_from([1, 7, 100, 130]),
    outputs=st.integers(1, 200),
    bias=st.booleans(),
    in_order=st.booleans(),
)
def test_against_float64(rows, inputs, outputs, bias, in_order):
    x, w, b = random(rows, inputs, seed=1), random(outputs, inputs, seed=2), random(outputs, seed=3)
    along = random(rows, outputs, seed=4)
    if not in_order:
        along = along.T.contiguous().T

    def run(x, w, b, along):
        layer = hypernet_linear.linear if x.dtype == torch.float32 else F.linear
        y, pullback = torch.func.vjp(lambda x, w, b: layer(x, w, b if bias else None), x, w, b)
        return y, *pullback(along)

    for narrow, exact in zip(*both(run, x, w, b, along), strict=True):
        close(narrow, exact, within())


@pytest.mark.usefixtures("products")
def test_more_blocks_than_programs(monkeypatch):
    from pefll.backend.kernels import hypernet_linear as kernels

    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    test_against_float64.hypothesis.inner_test(5, 100, 700, True, True)


def test_a_hypernetwork_uses_it(monkeypatch):
    network = Network(Hypernetwork(5, 1100, "S"))
    eta, v = network.init(0, "test").to(DEVICE), random(3, 5)
    calls = []
    monkeypatch.setattr(
        hypernet_linear, "_linear", lambda *given, real=hypernet_linear._linear: calls.append(given) or real(*given)
    )

    def run(eta, v):
        y, pullback = network_vjp(network, network, eta, v)
        d_eta, d_v = pullback(y)
        return d_eta, d_v

    d_eta, d_v = run(eta, v)
    assert len(calls) == 1
    assert list(d_eta) == network.names
    exact_eta, exact_v = run(eta.double(), v.double())
    close(network.flatten(list(d_eta.values())), exact_eta)
    close(d_v, exact_v)


def test_layers_that_torch_computes():
    w = random(client_axis.MOST_OUTPUTS + 1, 8)
    assert hypernet_linear.takes(random(2, 8), w)
    assert not hypernet_linear.takes(random(2, 8), w[:-1])  # for `client_axis.linear`
    assert not hypernet_linear.takes(random(hypernet_linear.MOST_ROWS + 1, 8), w)
    assert not hypernet_linear.takes(random(2, 2, 8), w)
    assert not hypernet_linear.takes(random(0, 8), w)
    assert not hypernet_linear.takes(random(2, 8).double(), w.double())
    assert not hypernet_linear.takes(
        random(2, hypernet_linear.MOST_INPUTS + 1), random(len(w), hypernet_linear.MOST_INPUTS + 1)
    )
    x = random(3, 2, 8)
    mapped = torch.vmap(lambda x: linear_block(x, w, None, True))(x)
    close(mapped, F.relu(F.linear(x.double(), w.double())))


def test_a_wide_layer_of_a_mapped_network_is_left_to_torch_also_where_it_is_differentiated():
    first, second = random(6, 8, seed=1), random(client_axis.MOST_OUTPUTS + 1, 6, seed=2)

    def loss(x, first, second):
        return linear_block(linear_block(x, first, None, True), second, None, False).square().sum()

    gradient = torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))
    narrow, exact = both(gradient, random(3, 2, 8), first, second)
    close(narrow, exact)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_wanted_gradients_are_computed(wanted, monkeypatch):
    from pefll.backend.kernels import hypernet_linear as kernels

    made = []
    for name in ("input_gradient", "weight_gradient"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, name=name, real=real: made.append(name) or real(*given))
    given = [random(2, 4), random(40, 4, seed=1), random(40, seed=2)]

    def run(x, w, b):
        layer = hypernet_linear.linear if x.dtype == torch.float32 else F.linear
        return torch.func.grad(lambda *given: layer(*given).square().sum(), argnums=wanted)(x, w, b)

    for narrow, exact in zip(*both(run, *given), strict=True):
        close(narrow, exact)
    assert made == ["input_gradient"] * (0 in wanted) + ["weight_gradient"] * any(place > 0 for place in wanted)


def test_wrong_shapes_raise_torchs_error():
    for outputs in (10, client_axis.MOST_OUTPUTS + 1):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear_block(random(2, 8), random(outputs, 9), None, False)


def test_no_second_derivative():
    w = random(2000, 4)
    with pytest.raises(PefllError, match="PEFLL-E003"):
        torch.func.grad(
            lambda x: torch.func.grad(lambda x: hypernet_linear.linear(x, w, None).sum())(x).square().sum()
        )(random(2, 4))
