"""What a personal model takes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pefll.errors import PefllError
from pefll.models import CharLSTM
from pefll.personal import PersonalModel, check_input

PIXELS = {
    "model": "",
    "input_shape": [2, 3, 3],
    "normalise": [[0.1, 0.2], [0.5, 0.25]],
    "tokens": False,
    "class_names": [],
}
FEATURES = {"model": "", "input_shape": [4], "normalise": None, "tokens": False, "class_names": []}
TOKENS = {"model": "lstm", "classes": 6, "input_shape": [5], "normalise": None, "tokens": True, "class_names": []}


@pytest.mark.parametrize(
    ("facts", "x", "sentence"),
    [
        (PIXELS, np.zeros((2, 3, 3, 3), np.uint8), r"shape \(3, 3, 3\), but the run was trained on \(2, 3, 3\)"),
        (PIXELS, np.zeros((2, 2, 3, 3)), "uint8 pixels"),
        (FEATURES, np.zeros((0, 4)), "no samples"),
        (FEATURES, np.float64(3.0), "one row per sample"),
        (FEATURES, np.array([["a"] * 4]), "must hold numbers"),
        (FEATURES, np.array([[1, 2, np.nan, 4]]), "NaN or infinite"),
        (TOKENS, np.zeros((2, 5)), "tokens"),
        (TOKENS, np.full((2, 5), 6), "there is a token 6"),
        (TOKENS, np.full((2, 5), -1), "negative token"),
    ],
)
def test_inputs_that_are_refused(facts, x, sentence):
    with pytest.raises(PefllError, match=sentence):
        check_input(x, facts)


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
