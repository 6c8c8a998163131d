"""The LSTM kernels against the plain layer in float64, over random shapes; see test_kernels.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pefll.backend  # noqa: F401 (registers the faster versions)
from pefll import federation_from_arrays
from pefll.backend import client_axis, precision
from pefll.backend import lstm as backend_lstm
from pefll.core.errors import PefllError
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import Problem, build_method
from pefll.models import CharLSTM, Network
from pefll.models.lstm import lstm_layer
from tests.backend.test_kernels import DEVICE, EXAMPLES, close, interpreter, random  # noqa: F401 (fixture)
from tests.federations import flat

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see test_kernels.py


@st.composite
def layers(draw):
    return {
        "clients": draw(st.integers(1, 3)),
        "length": draw(st.integers(1, 4)),
        "samples": draw(st.sampled_from([1, 3, 16, 37])),
        "inputs": draw(st.sampled_from([1, 5, 8, 17])),
        # Up to 16 units one program has all of them; beyond that, programs exchange states.
        "hidden": draw(st.sampled_from([1, 4, 16, 17, 33, 70])),
    }


def arrays(clients, length, samples, inputs, hidden):
    gates = 4 * hidden
    shapes = ((length, samples, inputs), (gates, inputs), (gates, hidden), (gates,), (gates,))
    scale = hidden**-0.5
    return [scale ** (i > 0) * random(clients, *shape, seed=i) for i, shape in enumerate(shapes)]


def with_gradients(x, *parameters):
    """Return the states of a layer for each client, and the gradients of all inputs for some gradient of the states."""
    along = torch.cos(torch.arange(x.shape[1] * x.shape[2] * parameters[1].shape[2], device=x.device)).to(x.dtype)

    def one(*inputs):
        states, pull_back = torch.func.vjp(lstm_layer, *inputs)
        return states, *pull_back(along.view(states.shape))

    return torch.vmap(one)(x, *parameters)


@EXAMPLES
@given(case=layers())
def test_an_lstm_layer_and_its_gradients(case):
    given_ = arrays(**case)
    assert client_axis.available(given_[0])
    for got, wanted in zip(with_gradients(*given_), with_gradients(*(a.double() for a in given_)), strict=True):
        close(got, wanted, within=3e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after another")
@pytest.mark.parametrize("clients", [1, 5, 50])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("name", "within"), [("float32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2)])
def test_leafs_layers_on_a_gpu(monkeypatch, clients, persistent, name, within):
    from pefll.backend.kernels import lstm

    monkeypatch.setattr(lstm, "persistent", persistent)
    before = precision.use(name)
    try:
        given_ = arrays(clients, 80, 32, 256, 256)
        results = [with_gradients(*given_) for _ in range(3)]
    finally:
        precision.use(before)
    for got, wanted in zip(results[0], with_gradients(*(a.double() for a in given_)), strict=True):
        close(got, wanted, within)
    for again in results[1:]:  # bit for bit
        assert all(torch.equal(one, other) for one, other in zip(again, results[0], strict=True))


def test_one_launch_for_all_time_steps_computes_the_same(monkeypatch):
    from pefll.backend.kernels import lstm

    given_ = arrays(2, 4, 3, 5, 16 if DEVICE == "cpu" else 256)
    together = with_gradients(*given_)
    monkeypatch.setattr(lstm, "persistent", False)
    for one, other in zip(together, with_gradients(*given_), strict=True):
        close(one, other.double(), within=1e-6)


@pytest.mark.parametrize("hidden", [4, 20])
def test_without_gradients_some_clients_are_computed_at_a_time(monkeypatch, hidden):
    given_ = arrays(5, 3, 2, 3, hidden)
    wanted = torch.vmap(lstm_layer)(*(each.double() for each in given_))
    for most in (1, 2 * 3 * 2 * 4 * hidden, 1 << 29):
        monkeypatch.setattr(backend_lstm, "MOST_AT_ONCE", most)
        close(torch.vmap(lstm_layer)(*given_), wanted)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs all programs at the same time")
def test_programs_of_a_sequence_exchange_states(monkeypatch):
    """Without waiting, a launch gets one more time step right: the states before it are those of the launch before."""
    from pefll.backend.kernels import lstm, lstm_sequence

    monkeypatch.setattr(lstm_sequence, "_wait", lambda arrived, target: None)
    monkeypatch.setattr(lstm, "persistent", False)
    length, samples, hidden = 3, 35, 40
    x, of_input, of_state, *biases = arrays(2, length, samples, 3, hidden)
    products = (x @ of_input.mT[:, None]).contiguous()
    wanted = torch.empty(2, length, samples, hidden)
    kept = lstm.forward(products.clone(), of_state, *biases, "tf32x3", True, wanted)
    got = [torch.zeros_like(each) for each in (*kept[:2], wanted)]
    for _ in range(length):
        lstm_sequence.forward(products, of_state, *biases, *got, got[2], "tf32x3", True, False)
    for one, other in zip(got, (*kept[:2], wanted), strict=True):
        close(one, other.double())
    g, back = random(*wanted.shape), of_state.mT.contiguous()
    dgates, db = lstm.backward(g, *kept[:2], back, "tf32x3")
    found, of_bias = torch.zeros_like(dgates), torch.zeros(2, 2, 4 * hidden)
    for _ in range(length):
        lstm_sequence.backward(g, *kept[:2], back, found, of_bias, "tf32x3")
    close(found, dgates.double())
    close(of_bias.sum(dim=1), db.double())


def test_clients_may_share_weights_or_inputs_or_be_mapped_in_several_axes():
    x, *parameters = arrays(2, 3, 4, 5, 6)
    shared = torch.vmap(lstm_layer, in_dims=(0, None, None, None, None))(x, *(each[0] for each in parameters))
    for client in range(2):
        close(shared[client], lstm_layer(x[client].double(), *(each[0].double() for each in parameters)))
    twice = [torch.stack([each, each.flip(0)]) for each in (x, *parameters)]
    got = torch.vmap(torch.vmap(lstm_layer))(*twice)
    close(got[1].flip(0), got[0].double(), within=1e-6)


@pytest.mark.parametrize("hidden", [4, 20])
def test_without_gradients_some_clients_at_a_time(monkeypatch, hidden):
    given_ = arrays(5, 3, 2, 3, hidden)
    wanted = torch.vmap(lstm_layer)(*(each.double() for each in given_))
    for most in (1, 2 * 3 * 2 * 4 * hidden, 1 << 29):
        monkeypatch.setattr(backend_lstm, "MOST_AT_ONCE", most)
        close(torch.vmap(lstm_layer)(*given_), wanted)


def test_ordinary_autograd_and_jacobians_take_the_kernels_too():
    given_ = [each[0] for each in arrays(1, 3, 2, 2, 3)]
    leaves = [each.clone().requires_grad_() for each in given_]
    wide = [each.double().requires_grad_() for each in given_]
    for got, wanted in zip(
        torch.autograd.grad(lstm_layer(*leaves).sin().sum(), leaves),
        torch.autograd.grad(lstm_layer(*wide).sin().sum(), wide),
        strict=True,
    ):
        close(got, wanted)
    jacobian = torch.func.jacrev(lstm_layer, argnums=2)
    close(jacobian(*given_), jacobian(*(each.double() for each in given_)))


def test_second_derivatives_are_refused():
    given_ = [each[0] for each in arrays(1, 2, 2, 2, 3)]

    def loss(of_state):
        return lstm_layer(given_[0], given_[1], of_state, *given_[3:]).square().sum()

    with pytest.raises(PefllError, match="PEFLL-E003"):
        torch.func.grad(lambda w: torch.func.grad(loss)(w).square().sum())(given_[2])


def test_nan_is_not_hidden():
    x, *parameters = (each[0] for each in arrays(1, 3, 2, 2, 3))
    x[1, 0] = torch.nan
    states = lstm_layer(x, *parameters)
    assert torch.isfinite(states[0]).all()
    assert torch.isnan(states[1:, 0]).all()
    assert torch.isfinite(states[1:, 1]).all()


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedrep", marks=pytest.mark.slow)])
def test_a_round_with_kernels_is_the_serial_engines(name):
    x = torch.arange(60).reshape(12, 5) * 5 % 7
    federation = federation_from_arrays(x.numpy(), x[:, 0].numpy(), [0] * 6 + [1] * 6, tokens=True)
    problem = Problem(Network(CharLSTM((5,), federation.classes, embedding=3, hidden=4)), (5,), 7, 2, tokens=True)
    settings = {"fedavg": {"local_steps": 2}, "fedrep": {"head_epochs": 1, "new_epochs": 1}}[name]
    method = build_method(name, problem, {"batch_size": 3, **settings})
    states = []
    for make, dtype, place in ((SerialEngine, torch.float64, {}), (VectorEngine, torch.float32, {"device": DEVICE})):
        engine = make(federation, method, seed=1, clients_per_round=2, dtype=dtype, **place)
        states.append(flat(engine.advance(engine.start(), 0, 1)).cpu().double())
        engine.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-5)
