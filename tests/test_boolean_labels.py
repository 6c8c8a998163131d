"""Labels that are True and False, of every type in tables and arrays, with and without gaps; types of predictions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import pefll
from pefll.data.label_report import label_sentence
from pefll.runs.personal import PersonalModel
from pefll.training.personalizing import write_each
from tests.cli.conftest import pefll as pefll_command  # noqa: F401 - a fixture

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

TRUE = np.arange(24) % 3 > 0  # in order, each of the four users has the labels False, True, True, ...


def table(liked=TRUE):
    x = np.random.default_rng(0).normal(size=(24, 2))
    return pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "user": np.repeat([*"ABCD"], 6), "liked": liked})


def with_gaps(kind):
    """Return the labels with a gap in the rows of the users C and D."""
    values = TRUE.astype(object)
    values[[12, 18]] = {"boolean": pandas.NA, "object": None, "float": np.nan}[kind]
    return pandas.Series(values, dtype=kind)


@pytest.fixture(scope="module")
def run():
    federation = pefll.federation_from_frame(table(), "liked", "user", unseen=0.25)
    return pefll.fit(federation, rounds=1, clients_per_round=2, local_steps=1, processes=1)


@pytest.mark.parametrize("liked", [TRUE.astype(object), pandas.array(TRUE), list(TRUE)], ids=["object", "null", "list"])
def test_booleans_of_every_type_train_as_a_column_of_them(liked):
    kinds = [pefll.federation_from_frame(table(each), "liked", "user", unseen=0.25) for each in (TRUE, liked)]
    assert kinds[0].fingerprint() == kinds[1].fingerprint()
    named = [(each.class_names, each.classes) for each in kinds]
    x = table()[["a", "b"]].to_numpy()
    for labels, expected in (("auto", "classes"), ("numbers", "numbers"), ("sets", "sets")):
        made = pefll.federation_from_arrays(x, liked, table().user, labels=labels)
        assert (made.labels, made.y.reshape(-1).tolist()) == (expected, TRUE.tolist())
        named += [(made.class_names, made.classes)] * (labels == "auto")
    assert set(named) == {named[0]}
    assert named[0][1] == 2
    both = table(liked).assign(other=TRUE.astype(object))
    assert pefll.federation_from_frame(both, ["liked", "other"], "user", unseen=0.25).labels == "sets"


@pytest.mark.parametrize("kind", ["object", "boolean"])
def test_gaps_among_booleans_refuse_nobody(run, kind, tmp_path):
    frame, there = table(with_gaps(kind)), ~with_gaps(kind).isna()
    frame.to_parquet(tmp_path / "new.parquet")
    frame.to_csv(tmp_path / "new.csv", index=False)
    wanted = {user: run.personalize(rows) for user, rows in table()[there].groupby("user")}
    x = frame.drop(columns="user")
    for read in (frame, pandas.read_parquet(tmp_path / "new.parquet"), pandas.read_csv(tmp_path / "new.csv")):
        with pytest.warns(UserWarning, match="2 of 24 samples left out"):
            models = run.personalize_each(read)
        for user, model in models.items():
            np.testing.assert_array_equal(model.probabilities(x), wanted[user].probabilities(x))
    with pytest.warns(UserWarning, match="left out"):
        trained = pefll.federation_from_frame(frame, "liked", "user", missing="drop-unlabelled", unseen=0.25)
    whole = pefll.federation_from_frame(table()[there], "liked", "user", unseen=0.25)
    assert (trained.fingerprint(), trained.class_names) == (whole.fingerprint(), whole.class_names)
    model = wanted["A"]
    assert model.metrics(x, frame.liked) == model.metrics(x[there], TRUE[there])
    assert model.certify(x, frame.liked).row() == model.certify(x[there], TRUE[there]).row()
    without = PersonalModel(model.network, dataclasses.replace(model.spec, class_names=()))  # of an earlier version
    assert without.metrics(x, frame.liked) == model.metrics(x, frame.liked)
    both = frame.assign(other=TRUE)
    with pytest.warns(UserWarning, match="left out"):
        sets = pefll.federation_from_frame(both, ["liked", "other"], "user", missing="drop-unlabelled", unseen=0.25)
    assert (sets.labels, len(sets.rows)) == ("sets", 22)


def test_the_classes_are_called_false_and_true(run):
    federation, frame = run.federation, table()
    assert federation.class_names == run.model_spec.class_names == ("False", "True")
    assert label_sentence(federation) == "label 'liked': False 33.3% and True 66.7%"
    numbers = pefll.federation_from_frame(table(TRUE.astype(int)), "liked", "user", unseen=0.25)
    assert numbers.class_names == ()
    mine = frame[frame.user == "A"]
    model = run.personalize(mine)
    assert model.class_names == ("False", "True")
    assert list(model.predict_frame(mine))[-2:] == ["probability_False", "probability_True"]
    truth = TRUE[:6]
    for liked in (truth.astype(str), truth.astype(int), truth.astype(int).astype(str), [0, np.nan, 1, 0, np.nan, 1]):
        rows = mine.assign(liked=liked).dropna()
        same = mine.loc[rows.index]
        np.testing.assert_array_equal(
            run.personalize(rows).probabilities(mine), run.personalize(same).probabilities(mine)
        )
        assert model.metrics(mine, liked) == model.metrics(same, same.liked)
    for wrong in (np.arange(6), [*"yn"] * 3):
        with pytest.raises(pefll.PefllError, match="PEFLL-D108"):
            run.personalize(mine.assign(liked=wrong))


def test_a_run_of_an_earlier_version_takes_booleans_as_numbers(run):
    frame = table()
    old = pefll.fit(
        dataclasses.replace(run.federation, class_names=()), rounds=1, clients_per_round=2, local_steps=1, processes=1
    )
    assert old.model_spec.class_names == ()
    now, before = run.personalize_each(frame), old.personalize_each(table(with_gaps("object")).dropna())
    assert before["A"].class_names == ("0", "1")
    mine = frame[frame.user == "A"]
    np.testing.assert_array_equal(before["A"].probabilities(mine), now["A"].probabilities(mine))
    assert old.evaluate(federation=run.federation) == run.evaluate()


def test_a_regression_takes_booleans_as_numbers(run):
    made = pefll.fit(run.federation, "fedavg", task="regression", rounds=1, local_steps=1, processes=1)
    assert (made.model_spec.class_names, made.federation.labels) == ((), "numbers")


@pytest.mark.parametrize("liked", [TRUE, TRUE.astype(int), np.where(TRUE, "7", "5"), TRUE * 1.5], ids=[*"bits"])
def test_predictions_have_the_type_of_the_labels(liked, tmp_path, pefll_command):  # noqa: F811
    frame = table(liked)
    federation = pefll.federation_from_frame(frame, "liked", "user", unseen=0.25)
    run = pefll.fit(federation, "fedavg", rounds=1, clients_per_round=2, local_steps=1, processes=1)
    write_each(run, run._owned(frame, None, None), tmp_path / "models")
    if liked.dtype.kind == "i":  # another kind of file may have narrower integers
        narrow = run._owned(frame.astype({"liked": np.int8}), None, None)
        assert write_each(run, narrow, tmp_path / "models").kept == [*"ABCD"]
    frame.to_parquet(tmp_path / "rows.parquet")
    words = ("--data", tmp_path / "rows.parquet", "--out", tmp_path / "out.csv")
    assert pefll_command("predict", tmp_path / "models", *words).code == 0
    model, mine = run.personalize_each(frame)["A"], frame[frame.user == "A"]
    kind = {"user": str, "liked": frame.liked.dtype, "predicted": frame.liked.dtype}
    found = [pefll.predict_each(tmp_path / "models", frame).frame(), pandas.read_csv(tmp_path / "out.csv", dtype=kind)]
    found += [run.predictions().frame(), model.predict_frame(mine)]
    found += [pandas.DataFrame({"predicted": model.predict(mine, names=True)})]
    assert found[2].label.dtype == found[2].predicted.dtype
    for each in found:
        if liked.dtype.kind == "f":
            assert each.predicted.dtype.kind == "f"
        else:
            assert each.predicted.dtype == frame.liked.dtype
            assert set(each.predicted) <= set(frame.liked)
