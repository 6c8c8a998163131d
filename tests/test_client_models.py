"""Models and predictions of a federation's own clients, and the history as a frame."""

from __future__ import annotations

import dataclasses
import math
import re
import sys

import numpy as np
import pytest
import torch

import pefll
from pefll.methods import METHODS
from pefll.runs.client_names import entry_of, names_in_summary
from pefll.training.personalizing import write_each
from tests.federations import ragged

QUICK = {"rounds": 2, "clients_per_round": 3, "processes": 1, "model": "tiny"}
SHORT = {"local": {"epochs": 2}, "pfedhn": {"new_rounds": 2, "local_steps": 2}}


def named(federation):
    names = tuple(f"user {number}" for number in range(federation.num_clients))
    return dataclasses.replace(federation, names=names, class_names=("red", "green", "blue"))


@pytest.fixture(scope="module")
def run():
    return pefll.fit(named(ragged()), **QUICK, local_steps=1)


@pytest.mark.parametrize("method", METHODS)
def test_a_clients_model_is_the_one_that_is_scored(method):
    settings = SHORT.get(method, {})
    trained = pefll.fit(ragged(clients=6), method, **QUICK | settings)
    scores = trained.evaluate_clients()
    found = trained.predictions()
    assert found.client.tolist() == [one.client for one in scores for _ in range(one.samples)]
    for one in scores:
        mine = found.client == one.client
        assert (found.predicted == found.label)[mine].sum() == one.correct
        loss = -np.log(found.probabilities[mine, found.label[mine]]).sum()
        assert math.isclose(loss, one.loss, rel_tol=1e-4, abs_tol=1e-4)
    for client in (0, 5):  # seen and unseen
        mine = found.client == client
        x = trained.federation.x[found.sample[mine]]
        model = trained.model_of(client)
        np.testing.assert_allclose(model.probabilities(x), found.probabilities[mine], atol=1e-6)


def test_predictions_keep_the_index_of_the_table(tmp_path):
    """Also if rows were left out, so that a sample's number is not its row."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": np.arange(60.0), "b": rng.normal(size=60), "y": ["no", "yes"] * 30})
    frame["who"] = np.arange(60) % 6
    frame.index = [f"id-{row}" for row in range(100, 160)]
    frame.loc[["id-100", "id-107"], "y"] = None
    with pytest.warns(UserWarning, match="without a label left out"):
        federation = pefll.federation_from_frame(frame, "y", "who", missing="drop-unlabelled", unseen=0.3)
    run = pefll.fit(federation, **QUICK, local_steps=1)
    found = run.predictions().frame()
    joined = found.join(frame)
    assert (joined.label == joined.y).all()
    assert (joined.client == joined.who.astype(str)).all()
    np.testing.assert_allclose(found.probability, found[["probability_no", "probability_yes"]].max(axis=1))
    frame.reset_index().to_csv(tmp_path / "rows.csv", index=False)
    with pytest.warns(UserWarning, match="left out"):
        other = run.predictions(federation=tmp_path / "rows.csv")
    assert (other.frame().label == frame.y.iloc[other.row].to_numpy()).all()
    mine = frame[frame.who == 3]
    shown = run.personalize(mine).predict_frame(mine)
    assert list(shown.columns) == ["predicted", "probability", "probability_no", "probability_yes"]
    assert (shown.index == mine.index).all()
    each = run.personalize_each(frame.dropna())
    folder = tmp_path / "models"
    write_each(run, run._owned(frame.dropna(), None, None), folder)
    of_each = pefll.predict_each(folder, frame).frame()
    assert (of_each.loc[mine.index, "predicted"] == each[3].predict(mine, names=True)).all()


def test_a_saved_run_and_other_data(run, tmp_path):
    federation = named(ragged())
    trained = pefll.fit(federation, "pfedhn", **QUICK, local_steps=1, new_rounds=1, out=tmp_path / "run")
    loaded = pefll.load(tmp_path / "run")
    mine, theirs = trained.model_of("user 2"), loaded.model_of("user 2", federation)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert loaded.clients == trained.clients
    assert loaded.clients.unseen == ("user 6", "user 7")
    assert names_in_summary({"partition": "by-class 2", "num_seen": 2, "num_clients": 3}) == (("0", "1"), ("2",))
    assert entry_of(federation) == {"client_names": loaded.summary["client_names"]}
    long = tuple(f"{number} {'x' * 200_000}" for number in range(federation.num_clients))
    assert entry_of(dataclasses.replace(federation, names=long)) == {}, "summary.json would become too large to be read"
    with pytest.raises(pefll.PefllError, match="PEFLL-T663"):
        assert dataclasses.replace(loaded, summary={}).clients
    for call, ask in {
        "model_of(0, federation=...)": lambda: loaded.model_of(0),
        "predictions(federation=...)": loaded.predictions,
        "evaluate(federation=...)": loaded.evaluate,
        "evaluate_clients(federation=...)": loaded.evaluate_clients,
    }.items():
        with pytest.raises(pefll.PefllError, match=f"this data, or other data, with {re.escape(call)} .PEFLL-T117"):
            ask()
    with pytest.raises(pefll.PefllError, match=r"predictions\(federation=\.\.\.\).*PEFLL-T139"):
        pefll.load(tmp_path / "run", federation=federation)
    assert len(run.predictions([0, 3], "train", ragged(seed=1))) == 1 + 9


def test_clients_are_numbers_or_names(run):
    both = run.predictions([np.int64(1), "user 4"], "train")
    assert both.client.tolist() == [1] * 3 + [4] * 40
    assert run.predictions("user 4", "train").client.tolist() == [4] * 40
    assert run.federation.y[both.sample].tolist() == both.label.tolist()
    for wrong in ("user 9", 8, -1, 1.0, True, None):
        with pytest.raises(pefll.PefllError, match="PEFLL-T625"):
            run.model_of(wrong)
    with pytest.raises(pefll.PefllError, match="PEFLL-T102"):
        run.predictions(split=1)
    empty = dataclasses.replace(run.federation, count=run.federation.count * torch.tensor([[1], [1], [0]]))
    for who in (None, 3):
        with pytest.raises(pefll.PefllError, match="PEFLL-T628"):
            run.predictions(who, federation=empty)
    elsewhere = dataclasses.replace(run.federation, rows=run.federation.rows[:0])
    with pytest.raises(pefll.PefllError, match="PEFLL-T626"):
        run.predictions(federation=elsewhere)


def test_an_integer_is_never_another_client_by_mistake(run):
    """It is a name, as in `unseen_clients`, where any client's name is a whole number."""
    ids = dataclasses.replace(run.federation, names=(), keys=np.array([0, 2, 1, 33, -4, 5, 6, 7]))
    some = dataclasses.replace(run.federation, names=("ann", "0", "2", "1.5", "007", "eve", "bob", "tom"))
    for federation, who, clients in (
        *((ids, who, [3]) for who in (33, "33", np.int64(33))),
        *((ids, who, [1, 2]) for who in ([2, 1], ["2", "1"], np.array([2, 1]))),
        (ids, -4, [4]),
        (some, [0, 2], [1, 2]),
    ):
        assert dict.fromkeys(run.predictions(who, "train", federation).client) == dict.fromkeys(clients)
    for federation, wrong in ((ids, 3), (ids, "3"), (ids, -1), (some, 4), (some, 7)):
        with pytest.raises(pefll.PefllError, match="PEFLL-T625"):
            run.predictions(wrong, "train", federation)
    for wrong in (3, -1):
        with pytest.raises(pefll.PefllError, match=r"federation\.name_of"):
            run.model_of(wrong, ids)


def test_frames(run, monkeypatch):
    pytest.importorskip("pandas")
    found = run.predictions("user 3")
    frame = found.frame()
    each = ["probability_red", "probability_green", "probability_blue"]
    assert list(frame.columns) == ["client", "sample", "label", "predicted", "probability", *each]
    assert set(frame.client) == {"user 3"}
    assert frame.label.tolist() == [("red", "green", "blue")[k] for k in found.label]
    assert frame.probability.tolist() == found.probabilities.max(axis=1).tolist()
    history = run.history_frame()
    assert history["round"].tolist() == [row["round"] for row in run.history]
    assert history.seen_per_sample.tolist() == [row["seen"]["per_sample"] for row in run.history]
    assert {"unseen_masked", "seconds", "bytes_up"} <= set(history.columns)
    none = dataclasses.replace(run, history=[*run.history, {"round": 9, "seen": None, "unseen": None}])
    assert math.isnan(none.history_frame().seen_per_sample.iloc[-1])
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (run.history_frame, found.frame):
        with pytest.raises(pefll.PefllError, match="PEFLL-T627"):
            ask()
