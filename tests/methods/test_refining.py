"""Steps on the device after generation: what they are, and that nothing changes without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pefll import PersonalModel, load
from pefll.core.errors import PefllError
from pefll.data.samples import TEST, TRAIN
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from pefll.training.checking import CHECKS, NotTried, Subject
from pefll.training.cost import cost_of_new_client
from pefll.training.evaluation import Evaluator, evaluate
from pefll.training.fitting import fit
from tests.engines.test_engines import SETTINGS
from tests.federations import flat, problem_of, ragged
from tests.methods.by_hand import both_engines, clients_of, models_of, opened

FAMILY = ("pefll", "pefll-prior", "pefll-plus")
SMALL = {"local_steps": 2, "batch_size": 4, "descriptor_size": 5, "hypernetwork": "S", "embedding": "mlp"}
STEPS = {"refine_steps": 4, "refine_lr": 0.3}
QUICK = {"rounds": 4, "eval_every": 2, "clients_per_round": 3, "processes": 1}
every_one = pytest.mark.parametrize("name", FAMILY)


def federation_():
    return ragged(clients=8, sizes=(2, 5, 9, 14), seen=6)


def server_of(make, name, settings, federation):
    """A state that is trained without steps on the device."""
    engine = opened(make, name, settings, federation)
    server = engine.advance(engine.start(), 0, 2)
    engine.close()
    return server


def refined_by_torch(engine, client: int, theta: torch.Tensor) -> torch.Tensor:
    """The same steps by torch.optim.SGD on all samples of a client."""
    method, data = engine.method, engine.federation
    rows = data.indices(client, TRAIN)
    theta = theta.clone().requires_grad_()
    decay = 2 * method.lambda_theta
    sgd = torch.optim.SGD([theta], lr=method.refine_lr, momentum=method.client_momentum, weight_decay=decay)
    for _ in range(method.refine_steps):
        sgd.zero_grad()
        F.cross_entropy(method.problem.model(theta, data.x[rows].double()), data.y[rows]).backward()
        assert theta.grad.norm() > method.client_clip  # so that the cut matters
        torch.nn.utils.clip_grad_norm_([theta], method.client_clip)
        sgd.step()
    return theta.detach()


@both_engines
@every_one
def test_the_steps_are_torchs_sgd_from_the_generated_model(make, name):
    federation = clients_of(sizes=(20, 7, 30, 11))
    settings = SMALL | {"batch_size": 0, "client_clip": 0.01, "lambda_theta": 0.02}
    server = server_of(make, name, settings, federation)
    plain, refining = (opened(make, name, settings | more, federation) for more in ({}, STEPS))
    generated, refined = models_of(plain, server), models_of(refining, server)
    for client in range(4):
        wanted = refined_by_torch(refining, client, generated[client])
        torch.testing.assert_close(refined[client], wanted, rtol=0, atol=1e-11)
        assert (refined[client] - generated[client]).abs().max() > 1e-4
    for engine in (plain, refining):
        engine.close()


def test_batches_are_drawn_for_this_purpose_alone():
    federation = clients_of(sizes=(30,))
    engine = opened(SerialEngine, "pefll", SMALL | STEPS | {"local_steps": 4, "client_lr": 0.3}, federation)
    client, theta = engine._client(1, 0), engine.method.problem.model.init(0, "x").double()
    adapted, refined = theta - engine.method.adapt(client, theta), engine.method.refine(client, theta).value
    assert not torch.equal(adapted, refined)  # the same steps on other batches
    wanted = theta.clone().requires_grad_()
    sgd = torch.optim.SGD([wanted], lr=0.3, momentum=0.9, weight_decay=2 * engine.method.lambda_theta)
    batches = list(client.batches("refine", 4, 4))
    assert {len(batch.y) for batch in batches} == {4}
    for batch in batches:
        sgd.zero_grad()
        F.cross_entropy(engine.method.problem.model(wanted, batch.x), batch.y).backward()
        sgd.step()
    torch.testing.assert_close(refined, wanted.detach(), rtol=0, atol=1e-12)
    engine.close()


@both_engines
@every_one
def test_training_takes_no_notice(make, name):
    states, ledgers = [], []
    for settings in ({}, {"refine_steps": 0, "refine_lr": 0.7}, STEPS):
        engine = opened(make, name, SMALL | settings)
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        ledgers.append(vars(engine.ledger))
        engine.close()
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert ledgers[0] == ledgers[1] == ledgers[2]


@every_one
def test_without_steps_nothing_is_asked_for(name):
    plain, refining = (opened(VectorEngine, name, SMALL | more).method for more in ({}, STEPS))
    assert "refine" not in plain.client_tasks
    assert plain.kept_arguments == {}
    assert not plain.trains_new_clients
    assert (*plain.client_tasks, "refine") == refining.client_tasks
    assert refining.kept_arguments == {"predict": ("theta",)}
    assert refining.trains_new_clients


@both_engines
@every_one
def test_a_client_sends_nothing_for_it(make, name):
    """The model goes down once, and what is made of it stays: the exchanges and bytes are those without steps."""
    federation = federation_()
    costs, scored = [], []
    for more in ({}, STEPS):
        engine = opened(make, name, SMALL | more, federation)
        server = engine.start()
        costs.append(cost_of_new_client(federation, engine.method, server, 7))
        ((_, cohort),) = engine.cohorts(np.array([7]))
        engine.method.personalize(server, cohort)
        scored.append(cohort.ledger)
        engine.close()
    assert costs[0][:3] == costs[1][:3]
    assert costs[1].flops > costs[0].flops
    size = opened(make, name, SMALL, federation).method.problem.model.size
    assert scored[1].down - scored[0].down == 8 * size  # without steps it goes down where it is scored
    assert scored[1].up == scored[0].up


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@every_one
def test_what_must_hold_for_every_method(name, check):
    try:
        check(Subject(name, SETTINGS[name] | {"refine_steps": 3, "refine_lr": 0.05}))
    except NotTried as error:
        pytest.skip(str(error))


@both_engines
def test_new_clients_are_scored_at_the_end_only(make):
    engine = opened(make, "pefll", SMALL | STEPS, federation_())
    server = engine.start()
    exam, whole = (
        Evaluator(engine, engine.method, TEST).begin(server).wait(),
        evaluate(engine, engine.method, server, TEST),
    )
    assert exam.unseen is None
    assert whole.unseen is not None
    np.testing.assert_allclose(exam.seen, whole.seen, rtol=0, atol=1e-12)
    engine.close()


@every_one
def test_a_trained_run_takes_other_steps(name, tmp_path):
    federation = federation_()
    settings = SETTINGS[name] | {"batch_size": 64}  # whole splits, so that a client's number does not matter
    run = fit(federation, name, out=tmp_path / "run", **QUICK, **settings)
    trained = fit(federation, name, **QUICK, **settings, **STEPS)
    assert torch.equal(flat(run.final), flat(trained.final))
    later = load(tmp_path / "run").with_settings(refine_steps="4", refine_lr="0.3")
    assert later.config.settings == trained.config.settings
    assert later.summary == run.summary | {}
    same = load(tmp_path / "run")
    assert same.with_settings() is same
    if torch.equal(flat(run.server), flat(trained.server)):  # the best round may be another one with steps
        assert later.evaluate(federation=federation) == trained.evaluate()
    rows, held_out = federation.indices(7), federation.indices(7, TEST)
    x, y = federation.x[rows].numpy(), federation.y[rows].numpy()
    models = [later.personalize(x, y), run.personalize(x, y)]
    assert np.abs(models[0].probabilities(x) - models[1].probabilities(x)).max() > 1e-3
    models[0].save(tmp_path / "me.safetensors")
    again = PersonalModel.load(tmp_path / "me.safetensors")
    np.testing.assert_array_equal(again.probabilities(x), models[0].probabilities(x))
    each = later.personalize_each(x, y, client=np.zeros(len(x), dtype=int))
    np.testing.assert_array_equal(each[0].probabilities(x), again.probabilities(x))
    one = next(one for one in later.evaluate_clients(federation=federation) if one.client == 7)
    right = int((again.predict(federation.x[held_out].numpy()) == federation.y[held_out].numpy()).sum())
    assert one.correct == right


def test_what_training_has_used_cannot_change():
    run = fit(federation_(), "pefll", **QUICK, **SETTINGS["pefll"])
    with pytest.raises(PefllError, match=r"\bclient_lr\b.*\brefine_steps\b.*\brefine_lr\b.*PEFLL-T131"):
        run.with_settings(client_lr=0.1)
    with pytest.raises(PefllError, match="PEFLL-A101"):
        run.with_settings(refine_step=10)
    with pytest.raises(PefllError, match="PEFLL-A014"):
        run.with_settings(refine_lr=-1)
    other = fit(federation_(), "fedavg", **QUICK, **SETTINGS["fedavg"])
    with pytest.raises(PefllError, match=r"^(?!.*refine_).*PEFLL-T131"):
        other.with_settings(local_steps=77)


def test_a_client_without_labels_cannot_take_them():
    federation = federation_()
    unlabeled = SETTINGS["pefll"] | {"embedding": "mlp-unlabeled"}
    run = fit(federation, "pefll", **QUICK, **unlabeled, **STEPS)
    x = federation.x[federation.indices(7)].numpy()
    with pytest.raises(PefllError, match=r"run.with_settings\(refine_steps=0\).*PEFLL-T132"):
        run.personalize(x)
    assert np.isfinite(run.with_settings(refine_steps=0).personalize(x).probabilities(x)).all()
    needs = fit(federation, "pefll", **QUICK, **(unlabeled | {"embedding": "mlp"}), **STEPS)
    with pytest.raises(PefllError, match="PEFLL-T122"):
        needs.personalize(x)


def test_steps_help_new_clients():
    """After few rounds the generated models are poor, and ten steps make them better."""
    federation = ragged(clients=12, sizes=(40,), seen=10)
    settings = {"server_lr": 2e-3, "client_lr": 0.02, "local_steps": 10}
    method = build_method("pefll", problem_of(federation), settings)
    engine = VectorEngine(federation, method, seed=0, clients_per_round=5)
    server = engine.advance(engine.start(), 0, 5)
    before = evaluate(engine, method, server, TEST)
    refining = build_method("pefll", problem_of(federation), settings | {"refine_steps": 10, "refine_lr": 0.02})
    after = evaluate(engine, refining, server, TEST)
    engine.close()
    assert after.unseen.loss < before.unseen.loss
    assert after.seen.loss < before.seen.loss
