"""`Run.certify` and `PersonalModel.certify` in Python, and what their certificates hold."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

import pefll
from pefll.core.errors import PefllError
from pefll.data.samples import TEST, TRAIN
from pefll.guarantees.held_out import mean_statements
from pefll.models.spec import ModelSpec
from pefll.runs.record import RunFolder
from pefll.training.certificate import certify_summary
from tests.federations import ragged


@pytest.fixture(scope="module")
def federation():
    return pefll.make_federation(pefll.load_samples("digits"), partition="by-class 3", clients=20, seed=0, unseen=0.5)


@pytest.fixture(scope="module")
def trained(federation, tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate") / "run"
    # Trained until no bound from unseen clients is 0, so that a wrong bound differs from the right one.
    method = pefll.PeFLL(local_steps=2, client_lr=0.1, server_lr=2e-3)
    return pefll.fit(federation, method, model="mlp", rounds=20, clients_per_round=3, out=folder, device="cpu"), folder


def test_a_run_certifies_itself(trained, federation):
    run, folder = trained
    found = run.certify(delta=0.1, share=0.6)
    values = []
    for client in range(10, 20):  # the unseen ones, each with its own model
        train, test = (federation.indices(client, split) for split in (TRAIN, TEST))
        model = run.personalize(federation.x[train], federation.y[train])
        values.append(float(np.mean(model.predict(federation.x[test]) == federation.y[test].numpy())))
    wanted = mean_statements(values, 0.1)
    assert [found[one.name] for one in wanted] == wanted
    mean = sum(values) / 10
    assert all(0 < found[one.name].bound < mean for one in wanted)
    assert found["mean-hoeffding"].bound == pytest.approx(mean - math.sqrt(math.log(10) / 20))
    tenths = math.floor(1000 * found["mean-betting"].bound)
    assert found.headline == f"expected accuracy of a new client at least {tenths / 10}% with confidence 90%"
    assert found.clients == 10
    assert str(found).startswith("With confidence 90%: The expected accuracy of a new client is at least ")
    assert len(str(found)) < 320
    assert len(repr(found)) < 400
    assert str(found["mean-betting"]._replace(bound=0.0)).endswith("This bound says nothing.")
    assert str(found["theorem-3.2-unequal"]).count("says nothing") == 1
    page = " ".join(found.page().split())
    assert all(" ".join(words.split()[:3]) in page for words in (*found.assumptions, *found.notes))
    assert run.summary["certificate"] == found.to_json()
    model = run.personalize(federation.x[:20], federation.y[:20])
    assert model.spec.certificate == found.headline
    bounds = [one for one in found.statements if not one.lower]  # see test_meta_bounds.py
    assert [one.name for one in bounds] == ["theorem-3.2-unequal", "theorem-3.2-unequal-cross-entropy"]
    assert all(one.bound > one.measured > 0 and one.confidence == 0.9 for one in bounds)
    found.write(RunFolder(folder))
    assert pefll.load(folder).summary["certificate"]["headline"] == found.headline
    assert "certificate" not in run.with_settings(refine_steps=2).summary
    assert run.with_settings(refine_steps=0).summary["certificate"] == found.to_json()


def test_other_settings_are_measured_anew(trained, federation):
    """The summary's test figures are of models without refining steps."""
    run, _ = trained
    refined = dataclasses.replace(run.with_settings(refine_steps=30, refine_lr=0.1), federation=federation)
    values = [one.accuracy for one in refined.evaluate_clients("test") if not one.seen]
    found = refined.certify(bounds=False)
    assert found.statements[0] == mean_statements(values, 0.05)[0]
    assert found.statements[0].measured != run.certify(bounds=False).statements[0].measured
    assert any("measured now, with refine_steps=30 and refine_lr=0.1" in note for note in found.notes)
    assert not any("measured now" in note for note in run.certify(bounds=False).notes)


def test_clients_that_were_drawn_by_size_are_explained(trained):
    notes = certify_summary(trained[0].summary | {"sampling": "samples"}, "the run").notes
    (note,) = [one for one in notes if "in proportion to their numbers of samples" in one]
    assert "each client counts once" in note
    assert "Theorem" not in note  # nothing here is from training
    own = certify_summary(trained[0].summary | {"sampling": "mine:largest"}, "the run").notes
    assert any("by a function (mine:largest)" in one for one in own)
    assert not any("Training" in one for one in certify_summary(trained[0].summary, "the run").notes)

    settings = {"model": "mlp", "rounds": 2, "clients_per_round": 2, "device": "cpu", "prior_clients": 0.5}
    run = pefll.fit(ragged(clients=12), pefll.PeFLL(local_steps=1), sampling="samples", **settings)
    assert run.summary["sampling"] == "samples"
    (note,) = [one for one in run.certify().notes if "in proportion to" in one]
    assert "The prior's clients were chosen at random without regard to size" in note
    assert "large ones are a little rarer" in note  # theorem-3.2-unequal


def assumptions(summary, **changed):
    return " ".join(certify_summary(summary | changed, "the run").assumptions)


def test_what_an_environment_does_not_promise_is_said(trained):
    summary = trained[0].summary
    plain = assumptions(summary)
    assert "nor this run among runs with other seeds" in plain
    assert "a client with fewer samples may get a worse model" in plain
    assert "other class proportions" not in assumptions(summary, partition="dirichlet 0.1")
    assert "about clients like the seen ones" in assumptions(summary, partition="dirichlet 0.1/0.5")


def test_a_run_that_a_callback_ended_must_not_have_watched_unseen_clients(trained, federation):
    assert "ended training" not in assumptions(trained[0].summary)
    early = pefll.EarlyStopping(patience=1, group="unseen", min_delta=2.0)
    settings = {"model": "mlp", "rounds": 9, "eval_every": 1, "clients_per_round": 3, "device": "cpu"}
    run = pefll.fit(federation, pefll.PeFLL(local_steps=1), callbacks=[early], **settings)
    after = run.summary["rounds"]
    assert after < 9
    found = " ".join(run.certify(bounds=False).assumptions)
    assert f"EarlyStopping ended training after round {after}, and it did not watch unseen clients." in found


def test_unseen_clients_that_were_named_are_no_random_sample():
    x, client = np.random.default_rng(0).normal(size=(160, 3)), np.repeat(np.arange(8), 20)
    labels = (x.sum(1) > 0).astype(int)
    found = {}
    for name, choice in (("named", {"unseen_clients": [1, 4, 6]}), ("random", {"unseen": 0.4})):
        federation = pefll.federation_from_arrays(x, labels, client, **choice)
        run = pefll.fit(federation, pefll.PeFLL(local_steps=1), rounds=1, device="cpu")
        found[name] = " ".join(run.certify(bounds=False).assumptions)
        assert " ".join(run.certify(bounds=False, federation=federation).assumptions) == found[name]
        assert federation.holding_out(0.5).named_unseen is False
    assert "chosen by name, not at random" in found["named"]
    assert "finite population" not in found["named"]
    assert "chosen at random among the clients of the data" in found["random"]
    assert "by name" not in found["random"]


def test_test_samples_that_are_the_last_in_time_are_said_to_be():
    random = np.random.default_rng(0)
    x, client, day = random.normal(size=(160, 3)), np.repeat(np.arange(8), 20), np.tile(np.arange(20), 8)
    found = {}
    for name, time in (("random", None), ("last", day)):
        samples = pefll.samples_from_arrays(x, (x.sum(1) > 0).astype(int), client, time=time)
        for unseen in (0.5, 0.0):
            federation = pefll.natural(samples, unseen=unseen)
            run = pefll.fit(federation, pefll.PeFLL(local_steps=1), rounds=1, device="cpu")
            text = " ".join(run.certify().assumptions)
            found.setdefault(name, set()).add("its last ones in time" in text)
    assert found == {"random": {False}, "last": {True}}


def test_a_run_measures_what_its_summary_lacks(trained, federation):
    run, _ = trained
    summary = run.summary | {"client_counts": None}
    bare = dataclasses.replace(run, summary=summary, federation=federation)
    assert bare.certify(share=0.6).statements == run.certify(share=0.6).statements
    same = run.certify(share=0.6, federation=federation)  # measured again
    assert same.statements == run.certify(share=0.6).statements
    with pytest.raises(PefllError, match="PEFLL-G121"):
        certify_summary(summary, "the run")


def test_lines_that_need_more_clients_are_left_out_unless_they_are_asked_for(trained):
    run, _ = trained
    found = run.certify(bounds=False)
    assert [one.name for one in found.statements] == ["mean-betting", "mean-bernstein", "mean-hoeffding"]
    assert any("needs 29 unseen clients, but there are 10" in note for note in found.notes)
    with pytest.raises(PefllError, match="PEFLL-G110"):
        run.certify(share=0.9)
    with pytest.raises(PefllError, match="PEFLL-G103"):
        run.certify(delta=0)
    one = run.certify(share=0.73, bounds=False)
    assert [statement.name for statement in one.statements][3:] == ["share-measured"]  # the true one needs 11
    assert any("together with confidence 90%" in note for note in one.notes)


def test_a_model_counts_its_own_samples(trained, federation):
    model = trained[0].personalize(federation.x[:20], federation.y[:20])
    x, y = federation.x[20:70], federation.y[20:70]
    found = model.certify(x, y)
    right = int((model.predict(x) == y).sum())
    assert (found.terms["correct"], found.terms["samples"]) == (right, 50)
    assert found.bound < found.measured == right / 50
    for judge in (model.certify, model.metrics):
        with pytest.raises(PefllError, match="PEFLL-G131"):
            judge(x, np.where(y == y[0], 10, y))
    with pytest.raises(PefllError, match="PEFLL-M501"):
        model.certify(x, y[:-1])
    with pytest.raises(PefllError, match="PEFLL-G103"):
        model.certify(x, y, delta=1.0)


def test_a_regression_has_no_accuracy():
    random = np.random.default_rng(0)
    x, client = random.normal(size=(120, 3)), np.repeat(np.arange(6), 20)
    federation = pefll.federation_from_arrays(x, x.sum(1), client, unseen=0.5)
    run = pefll.fit(federation, pefll.PeFLL(local_steps=1), task=pefll.Regression(), rounds=1, device="cpu")
    with pytest.raises(PefllError, match=r"rmse.*no largest value.*PEFLL-G124"):
        run.certify()
    with pytest.raises(PefllError, match=r"predicts numbers.*PEFLL-G130"):
        run.personalize(x[:20], x[:20].sum(1)).certify(x, x.sum(1))


def within(output, y):
    return (output[:, 0] - y).abs() < 0.1


class Near(pefll.Regression):
    """Its first metric is a share of the user's own."""

    @property
    def measured(self):
        return (pefll.Metric("within", within, bounds=(0, 1)), *super().measured)


def test_an_own_share_that_comes_first_is_certified(tmp_path):
    random = np.random.default_rng(0)
    x, client = random.normal(size=(240, 3)), np.repeat(np.arange(12), 20)
    federation = pefll.federation_from_arrays(x, x.sum(1), client, unseen=0.5)
    settings = {"rounds": 1, "device": "cpu", "out": tmp_path / "run", "processes": 1}
    run = pefll.fit(federation, "fedavg", task=Near(), **settings)
    clients = [one.metrics["within"] for one in run.evaluate_clients() if not one.seen]
    measured = pytest.approx(np.mean(clients), abs=1e-5)
    assert 0 < np.mean(clients) < 1
    for found in (run.certify(bounds=False), run.certify(bounds=False, federation=federation)):
        assert found.statements[0].measured == measured
        assert 0 < found.statements[0].bound < found.statements[0].measured
        assert "expected within of a new client" in found.statements[0].promise
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert certify_summary(summary, "the run").statements[0].measured == measured
    with pytest.raises(PefllError, match=r"within, which is better when smaller.*PEFLL-G129"):
        certify_summary(summary | {"errors": ["within"]}, "the run")


def test_files_of_other_versions_stay_readable(trained, federation):
    spec = trained[0].personalize(federation.x[:20], federation.y[:20]).spec
    content = json.loads(json.dumps(dataclasses.replace(spec, certificate=None).to_json()))
    assert "certificate" not in content  # so files without one are those of earlier versions
    assert ModelSpec.from_json(content).certificate is None
    assert ModelSpec.from_json(content | {"certificate": "text"}).certificate == "text"
    with pytest.raises(ValueError, match="certificate makes no sense"):
        ModelSpec.from_json(content | {"certificate": 3})
