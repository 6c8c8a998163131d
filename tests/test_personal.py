"""What a personal model takes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from pefll.core.errors import PefllError
from pefll.models import CharLSTM
from pefll.models.spec import ModelSpec
from pefll.runs.personal import PersonalModel, check_input

FEATURES = ModelSpec(model="", input_shape=(4,), classes=3, normalise=None, tokens=False, class_names=(), num_clients=2)
PIXELS = replace(FEATURES, input_shape=(2, 3, 3), normalise=((0.1, 0.2), (0.5, 0.25)))
TOKENS = replace(FEATURES, model="lstm", input_shape=(5,), classes=6, tokens=True)


@pytest.mark.parametrize(
    ("spec", "x", "sentence"),
    [
        (
            PIXELS,
            np.zeros((2, 3, 3, 3), np.uint8),
            r"\(3, 3, 3\).*\(2, 3, 3\).*PEFLL-R117",
        ),
        (PIXELS, np.zeros((2, 2, 3, 3)), "PEFLL-R111"),
        (FEATURES, np.zeros((0, 4)), "PEFLL-R110"),
        (FEATURES, np.float64(3.0), "PEFLL-D104"),
        (FEATURES, np.array([["a"] * 4]), "PEFLL-D103"),
        (FEATURES, np.array([[1, 2, np.nan, 4]]), "PEFLL-R113"),
        (TOKENS, np.zeros((2, 5)), "PEFLL-D106"),
        (TOKENS, np.full((2, 5), 6), r"token 6.*PEFLL-R112"),
        (TOKENS, np.full((2, 5), -1), "PEFLL-D107"),
    ],
)
def test_inputs_that_are_refused(spec, x, sentence):
    with pytest.raises(PefllError, match=sentence):
        check_input(x, spec)


def test_inputs_that_are_taken():
    assert check_input(np.zeros((2, 2, 3, 3), np.uint8), PIXELS).dtype == np.uint8
    assert check_input([[1, 2, 3, 4]], FEATURES).dtype == np.float32
    assert check_input(np.zeros((2, 5), np.uint8), TOKENS).dtype == np.uint8


def test_pixels_are_normalised_inside():
    network = nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    model = PersonalModel(network, PIXELS)
    x = np.random.default_rng(0).integers(0, 256, (7, 2, 3, 3), dtype=np.uint8)
    plain = (x / 255 - np.array([0.1, 0.2]).reshape(2, 1, 1)) / np.array([0.5, 0.25]).reshape(2, 1, 1)
    wanted = network(torch.from_numpy(plain).float()).softmax(1).detach().numpy()
    np.testing.assert_allclose(model.probabilities(x), wanted, atol=1e-6)
    assert model.predict(x).tolist() == wanted.argmax(1).tolist()


def test_text_goes_in_as_tokens():
    network = CharLSTM((5,), 6, embedding=2, hidden=3)
    x = np.random.default_rng(0).integers(0, 6, (4, 5))
    scores = PersonalModel(network, TOKENS).probabilities(x)
    np.testing.assert_allclose(scores, network(torch.from_numpy(x)).softmax(1).detach().numpy(), atol=1e-6)


def test_many_samples_are_scored_in_parts():
    model = PersonalModel(nn.Linear(4, 3), FEATURES)
    x = np.random.default_rng(0).normal(size=(1100, 4)).astype(np.float32)
    parts = np.concatenate([model.probabilities(x[i : i + 1]) for i in range(0, 1100, 100)])
    np.testing.assert_allclose(model.probabilities(x)[::100], parts, atol=1e-6)


def test_samples_are_looked_through_once(monkeypatch):
    looked = []

    def counting(x, spec):
        looked.append(len(x))
        return check_input(x, spec)

    monkeypatch.setattr("pefll.runs.personal.check_input", counting)
    model = PersonalModel(nn.Linear(4, 3), FEATURES)
    assert model.probabilities(np.zeros((1100, 4))).shape == (1100, 3)
    assert model(np.zeros((5, 4))).shape == (5, 3)
    assert looked == [1100, 5]


@pytest.mark.parametrize("give", [torch.from_numpy, np.array, np.ndarray.tolist])
def test_called_with_tensors_arrays_and_lists(give):
    rng = np.random.default_rng(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    for network, spec, x in (
        (linear, PIXELS, rng.integers(0, 256, (7, 2, 3, 3), dtype=np.uint8)),
        (nn.Linear(4, 3), FEATURES, rng.normal(size=(7, 4)).astype(np.float32)),
        (CharLSTM((5,), 6, embedding=2, hidden=3), TOKENS, rng.integers(0, 6, (7, 5))),
    ):
        model = PersonalModel(network, spec)
        scores = model(give(x))
        assert scores.requires_grad, "an ordinary module, which can be trained on"
        np.testing.assert_allclose(scores.softmax(1).detach().numpy(), model.probabilities(x), atol=1e-6)


def test_gradients_reach_the_features_of_a_tensor():
    x = torch.zeros(2, 4, requires_grad=True)
    PersonalModel(nn.Linear(4, 3), FEATURES)(x).sum().backward()
    assert x.grad is not None
    assert PersonalModel(nn.Linear(4, 3), FEATURES).predict(x).shape == (2,)


@pytest.mark.parametrize(
    ("spec", "x", "sentence"),
    [
        (PIXELS, torch.zeros(2, 2, 3, 3), r"torch\.float32.*PEFLL-R114"),
        (
            PIXELS,
            torch.zeros(2, 3, 3, dtype=torch.uint8),
            r"\(2, 3, 3\).*x\[None\].*PEFLL-R116",
        ),
        (
            PIXELS,
            torch.zeros(4, 3, 3, 2, dtype=torch.uint8),
            r"\(3, 3, 2\).*\[N, 2, 3, 3\].*PEFLL-R117",
        ),
        (PIXELS, np.zeros((2, 3, 3), np.uint8), "PEFLL-R116"),
        (PIXELS, np.full((1, 2, 3, 3), 7).tolist()[0], "PEFLL-R116"),
        (PIXELS, np.full((1, 2, 3, 3), 256).tolist(), "PEFLL-R111"),
        (FEATURES, torch.tensor(1.0), r"\[N, 4\].*PEFLL-R117"),
        (
            FEATURES,
            torch.zeros(2, 4, dtype=torch.complex64),
            r"torch\.complex.*PEFLL-R115",
        ),
        (FEATURES, [1.0, 2.0, 3.0, 4.0], "PEFLL-R116"),
        (FEATURES, [[1.0], [2.0, 3.0]], r"samples: x.*PEFLL-D109"),
        (FEATURES, np.zeros((2, 5)), r"\(5,\).*\[N, 4\].*PEFLL-R117"),
        (TOKENS, torch.zeros(2, 5), "PEFLL-R115"),
    ],
)
def test_called_with_what_is_no_sample(spec, x, sentence):
    with pytest.raises(PefllError, match=sentence):
        PersonalModel(nn.Linear(4, 3), spec)(x)


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "me.safetensors"
    model = PersonalModel(nn.Linear(4, 3), FEATURES)
    model.save(path)
    before = path.read_bytes()
    other = PersonalModel(nn.Linear(4, 3), FEATURES)
    with pytest.raises(PefllError, match=r"me\.safetensors.*overwrite=True.*PEFLL-R106"):
        other.save(path)
    assert path.read_bytes() == before
    other.save(path, overwrite=True)
    again = PersonalModel.load(path, nn.Linear(4, 3))
    assert torch.equal(again.network.weight, other.network.weight)


@pytest.mark.parametrize(
    ("name", "code"),
    [(3, "PEFLL-A010"), (None, "PEFLL-A010"), (b"x", "PEFLL-A010"), ("a\0b", "PEFLL-A024"), ("a" * 300, "PEFLL-A025")],
)
def test_what_no_file_can_be_called_is_one_sentence(name, code):
    for use in (PersonalModel.load, PersonalModel(nn.Linear(4, 3), FEATURES).save):
        with pytest.raises(PefllError) as refused:
            use(name)
        assert refused.value.code == code
