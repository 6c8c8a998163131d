"""Warnings name the line of a user's code."""

import numpy as np
import pytest

import pefll
from tests.federations import ragged

QUICK = {"rounds": 1, "clients_per_round": 2, "device": "cpu", "engine": "serial"}


class Tells(pefll.Callback):
    def on_start(self, run):
        run.tell("it starts")


def of_a_callback():
    return pefll.fit(ragged(), "fedavg", callbacks=[Tells()], **QUICK)


def of_a_run():
    """Runs are generators, which take turns."""
    return pefll.fit(ragged(), "fedavg", **QUICK)


def of_a_new_client():
    """The function that warns is called by torch's, because of `torch.no_grad`."""
    run = pefll.fit(ragged(), "pefll", **QUICK)
    return run.personalize(ragged().x[:3], np.array([0.0, np.nan, 1.0]))


def of_data():
    return pefll.federation_from_arrays(np.zeros((9, 2)), [0, 1, 0] * 3, [0, 1, 1, 2, 2, 3, 3, 4, 4], min_samples=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (of_a_callback, "it starts"),
        (of_a_run, "hardly better"),
        (of_a_new_client, "1 of 3 samples left out"),
        (of_data, "1 of 5 clients left out"),
    ],
)
def test_the_source_of_a_warning_is_the_line_of_the_user(monkeypatch, call, words):
    monkeypatch.setattr("pefll.training.fitting.hardly_better", lambda federation, history: "hardly better")
    with pytest.warns(UserWarning, match=words) as caught:
        call()
    first = call.__code__.co_firstlineno
    (one,) = [one for one in caught if words in str(one.message)]
    assert one.filename == __file__
    assert first < one.lineno < first + 5
