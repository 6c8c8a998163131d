"""What holds for every registered method."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.core.tree import leaves
from pefll.data import federation_from_arrays
from pefll.data.federation import Federation
from pefll.data.samples import TEST, VALIDATION
from pefll.engines.vector import VectorEngine
from pefll.methods import METHODS, build_method, hyperparameters
from pefll.training.checking import CHECKS, NotTried, Subject, recording
from pefll.training.evaluation import scores_of
from pefll.training.fitting import fit
from tests.engines.test_engines import SETTINGS, slow_beyond_the_paper
from tests.federations import problem_of, ragged

every_method = pytest.mark.parametrize("method", sorted(METHODS))
QUICK = {"rounds": 6, "eval_every": 2, "clients_per_round": 3, "processes": 1}


def federation_() -> Federation:
    return ragged(clients=8, sizes=(2, 5, 9, 14), seen=6)


def whole_batches(method: str) -> dict[str, object]:
    """Settings with which a client trains on all its samples at once: its number and their order do not matter."""
    return SETTINGS[method] | {"batch_size": 64}


def as_bytes(tree) -> bytes:
    return b"".join(leaf.numpy().tobytes() for leaf in leaves(tree))


@every_method
def test_the_test_settings_know_every_method(method):
    assert method in SETTINGS
    assert set(SETTINGS[method]) <= set(hyperparameters(method))


@slow_beyond_the_paper("method")  # `a_seed_decides_everything` is the faster one
@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_a_seed_decides_everything(method, engine):
    def train(seed):
        return fit(federation_(), method, seed=seed, engine=engine, **QUICK, **SETTINGS[method])

    one, two, other = train(4), train(4), train(5)
    for part in ("final", "server"):
        assert as_bytes(getattr(one, part)) == as_bytes(getattr(two, part))
        assert as_bytes(getattr(one, part)) != as_bytes(getattr(other, part))
    assert one.summary["accuracy"] == two.summary["accuracy"]
    assert one.summary["best_round"] == two.summary["best_round"]


@every_method
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_must_hold_for_every_method(method, check):
    try:
        check(Subject(method, SETTINGS[method]))
    except NotTried as error:
        pytest.skip(str(error))


@slow_beyond_the_paper("method")  # `a_gpu_can_record_it` is the faster one
def test_a_gpu_can_record_rounds_and_exams_with_pictures(method):
    """The same as `a_gpu_can_record_it`, with a convolutional network on pixels, as in the paper's tables."""
    pictures = ragged(shape=(1, 16, 16), pixels=True)
    learner = build_method(method, problem_of(pictures, "lenet"), SETTINGS[method])
    engine = VectorEngine(pictures, learner, seed=0, clients_per_round=3)
    server = engine.start()
    cohorts = [cohort for _, cohort in engine.cohorts(np.arange(pictures.num_clients))]
    for record in (contextlib.nullcontext, recording):
        with record():
            after, *_ = engine.checked_round(server, torch.zeros((), dtype=torch.int64))
            for cohort in cohorts:
                scores_of(learner, server, cohort.anew(), VALIDATION)
    assert len(list(leaves(after))) == len(list(leaves(server)))
    engine.close()


@every_method
def test_a_model_without_bias_or_of_one_layer_only(method):
    """Every method runs on a linear model; where it needs a bias, it says so."""
    for model in (torch.nn.Linear(6, 3), torch.nn.Linear(6, 3, bias=False)):
        if method in ("pefll-prior", "pefll-plus") and model.bias is None:
            with pytest.raises(PefllError, match="PEFLL-N022"):
                fit(federation_(), method, model=model, **QUICK, **SETTINGS[method])
        else:
            run = fit(federation_(), method, model=model, **QUICK, **SETTINGS[method])
            assert run.summary["accuracy"]["best"]["unseen"] is not None


@every_method
def test_a_new_client_gets_a_model(method):
    federation = federation_()
    run = fit(federation, method, **QUICK, **whole_batches(method))
    assert run.summary["accuracy"]["best"]["unseen"] is not None
    rows = federation.indices(7)
    x, y = federation.x[rows].numpy(), federation.y[rows].numpy()
    scores = run.personalize(x, y).probabilities(x)
    assert scores.shape == (len(x), 3)
    assert np.isfinite(scores).all()
    # A client's own model does not depend on the order of its samples.
    turned = run.personalize(x[::-1].copy(), y[::-1].copy()).probabilities(x)
    np.testing.assert_allclose(turned, scores, atol=1e-5)


@every_method
def test_a_personal_model_is_what_evaluation_scored(method):
    federation = federation_()
    run = fit(federation, method, **QUICK, **whole_batches(method))
    right = total = 0
    for client in range(6, 8):
        rows, held_out = federation.indices(client), federation.indices(client, TEST)
        model = run.personalize(federation.x[rows].numpy(), federation.y[rows].numpy())
        right += int((model.predict(federation.x[held_out].numpy()) == federation.y[held_out].numpy()).sum())
        total += len(held_out)
    assert run.summary["accuracy"]["best"]["unseen"]["per_sample"] == pytest.approx(right / total)


def poisoned(federation: Federation, *, validation: bool) -> Federation:
    """Change whatever training must not look at: everything of unseen clients, and held-out samples of seen ones."""
    rows = [federation.indices(c, s) for c in range(federation.num_seen, federation.num_clients) for s in range(3)]
    splits = (VALIDATION, TEST) if validation else (TEST,)
    rows += [federation.indices(c, s) for c in range(federation.num_seen) for s in splits]
    chosen = torch.cat(rows)
    x, y = federation.x.clone(), federation.y.clone()
    x[chosen] = -5 * x[chosen] + 3 if x.dtype != torch.uint8 else 255 - x[chosen]
    y[chosen] = (y[chosen] + 1) % federation.classes
    return dataclasses.replace(federation, x=x, y=y)


@slow_beyond_the_paper("method")  # `held_out_data_is_not_looked_at` is the faster one
@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_not_one_byte_of_training_depends_on_held_out_data(method, engine):
    clean = federation_()
    runs = [
        fit(data, method, engine=engine, **QUICK, **SETTINGS[method])
        for data in (clean, poisoned(clean, validation=False), poisoned(clean, validation=True))
    ]
    assert as_bytes(runs[0].final) == as_bytes(runs[1].final) == as_bytes(runs[2].final)
    # Which round is best may depend on the seen clients' validation samples, and on nothing else.
    assert as_bytes(runs[0].server) == as_bytes(runs[1].server)
    assert runs[0].summary["best_round"] == runs[1].summary["best_round"]
    assert runs[0].summary["accuracy"] != runs[1].summary["accuracy"]  # the poison was there


def test_not_even_the_normalisation_of_a_users_images_depends_on_held_out_data():
    rng = np.random.default_rng(0)
    client, split = np.repeat(np.arange(6), 12), np.tile([0] * 8 + [1] * 2 + [2] * 2, 6)
    y = rng.integers(0, 3, 72)
    x = rng.integers(0, 100, (72, 1, 8, 8), dtype=np.uint8)

    def make(pixels, labels):
        return federation_from_arrays(pixels, labels, client, split=split, unseen=0.34, classes=3)

    clean = make(x, y)
    held_out = poisoned(clean, validation=True)
    dirty = make(held_out.x.numpy(), held_out.y.numpy())
    assert not torch.equal(dirty.x, clean.x)
    quick = QUICK | {"rounds": 2, "local_steps": 2}
    one, two = (fit(data, "pefll", **quick) for data in (clean, dirty))
    assert one.model_spec.normalise == two.model_spec.normalise
    assert as_bytes(one.final) == as_bytes(two.final)
