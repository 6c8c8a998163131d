"""What Python users do with a run."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from torch import nn

import pefll
from pefll.core.signals import Stopped
from pefll.engines import hardware
from pefll.models import CharLSTM
from tests.federations import ragged

QUICK = {"rounds": 2, "local_steps": 1, "clients_per_round": 2}


@pytest.mark.parametrize("shape", [(9, 9), (9, 9, 3)])
def test_a_new_clients_images_may_be_laid_out_as_the_training_images_were(shape):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, *shape), dtype=np.uint8)
    y = np.array(["cat", "dog"])[rng.integers(0, 2, 60)]
    federation = pefll.federation_from_arrays(x, y, np.repeat(np.arange(6), 10))
    run = pefll.fit(federation, **QUICK)
    model = run.personalize(x[:5], y[:5])
    assert model.predict(x[:5]).shape == (5,)
    stored = np.moveaxis(x[:5].reshape(5, 9, 9, -1), 3, 1)
    np.testing.assert_array_equal(model.probabilities(x[:5]), model.probabilities(stored))
    with pytest.raises(pefll.PefllError, match=r"class 'cow'.*PEFLL-D108"):
        run.personalize(x[:5], np.array(["cow"] * 5))


def test_fedavg_needs_no_labels_and_pefll_says_how_to_do_without():
    federation = ragged()
    x = federation.x[:3].numpy()
    model = pefll.fit(federation, "fedavg", **QUICK).personalize(x)
    assert model.predict(x).shape == (3,)
    with pytest.raises(pefll.PefllError, match=r"embedding='mlp-unlabeled'.*PEFLL-T122"):
        pefll.fit(federation, **QUICK).personalize(x)
    texts = np.random.default_rng(0).integers(0, 3, (40, 4))
    texts_of_four = pefll.federation_from_arrays(texts, texts[:, 0], np.arange(40) % 4, tokens=True)
    with pytest.raises(pefll.PefllError, match=r"embedding='lstm-unlabeled'.*PEFLL-T122"):
        pefll.fit(texts_of_four, model=CharLSTM((4,), 3, hidden=4), **QUICK).personalize(texts)


def test_other_data_must_be_of_the_same_kind():
    run = pefll.fit(ragged(), **QUICK)
    assert run.evaluate(federation=ragged(seed=1)).seen is not None
    assert run.evaluate(federation=ragged(seen=0)).seen is None  # new clients only
    with pytest.raises(pefll.PefllError, match=r"\b3 classes.*\(6,\).*\b3\b.*\(7,\).*PEFLL-T121"):
        run.evaluate(federation=ragged(shape=(7,)))


def test_settings_that_belong_elsewhere():
    with pytest.raises(pefll.PefllError, match="PEFLL-T107"):
        pefll.fit(ragged(), unseen=0.2)


def test_stopping_is_an_interrupt_that_a_loop_over_seeds_does_not_swallow():
    assert issubclass(Stopped, KeyboardInterrupt)
    assert not issubclass(Stopped, Exception)


def test_a_model_that_has_a_length_is_taken_all_the_same(tmp_path):
    class Long(nn.Linear):
        def __len__(self):
            return 0

    pefll.fit(ragged(clients=4, sizes=(9,)), "fedavg", model=Long(6, 3), out=tmp_path / "run", **QUICK)
    assert pefll.load(tmp_path / "run", model=Long(6, 3)).method.problem.model.size == 21


def test_a_loaded_run_finds_its_data(tmp_path):
    samples = pefll.load_samples("digits")
    federation = pefll.make_federation(samples, partition="by-class 2", clients=10, seed=0)
    run = pefll.fit(federation, out=tmp_path / "run", model="mlp", **QUICK)
    loaded = pefll.load(tmp_path / "run")
    assert loaded.evaluate() == run.evaluate()
    assert repr(loaded) == "Run(pefll on digits, best of 2 rounds)"


def test_what_is_easily_given_in_place_of_a_federation_or_a_model():
    arrays = (np.zeros((4, 2)), np.zeros(4, dtype=int))
    for call in (lambda: pefll.fit(arrays, rounds=1), lambda: pefll.fit_seeds(arrays, seeds=[0], rounds=1)):
        with pytest.raises(pefll.PefllError, match=r"\btuple\b.*pefll\.federation_from_arrays.*PEFLL-A019"):
            call()
    with pytest.raises(pefll.PefllError, match=r"class Linear.*PEFLL-T105"):
        pefll.fit(ragged(), model=nn.Linear, rounds=1)
    with pytest.raises(pefll.PefllError, match="PEFLL-T106"):
        pefll.fit(ragged(), model=3, rounds=1)


def test_who_asks_a_cpu_for_what_only_a_gpu_has_is_told():
    quick = {"rounds": 1, "clients_per_round": 2, "local_steps": 1, "device": "cpu"}
    with pytest.warns(UserWarning, match="training in float32: only a GPU has bf16"):
        run = pefll.fit(ragged(), "fedavg", precision="bf16", **quick)
    assert run.summary["precision"] == "float32"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training in")
        for precision in ("auto", "float32", "float64"):
            pefll.fit(ragged(), "fedavg", precision=precision, **quick)


def test_a_run_of_several_processes_is_evaluated_where_the_vector_engine_is_chosen(monkeypatch):
    monkeypatch.setattr(hardware, "pick_engine", lambda device, problem: "serial")  # as on another machine
    run = pefll.fit(ragged(), "fedavg", rounds=1, clients_per_round=2, local_steps=1, device="cpu", processes=2)
    monkeypatch.setattr(hardware, "pick_engine", lambda device, problem: "vector")
    assert run.evaluate().seen
