"""Rows of many clients are predicted by each client's own model, and never by the model of one of them."""

from __future__ import annotations

import csv
import dataclasses
import json
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pefll as package
from benchmarks.users_table import users_table
from pefll import load
from pefll.core.errors import PefllError
from pefll.runs.model_folder import INDEX, file_name
from pefll.runs.personal import PersonalModel
from pefll.training.personalizing import write_each
from tests.cli.conftest import pefll, refused  # noqa: F401 - fixtures
from tests.test_personalizing import STRANGE, by_command, table, trained  # noqa: F401 - fixtures

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


@pytest.fixture
def models(trained, tmp_path):  # noqa: F811
    """A folder of models for ann, bob and eve."""
    run = load(trained)
    write_each(run, run._owned(table(["ann", "bob", "eve"]), None, None), tmp_path / "models")
    return tmp_path / "models"


def test_one_model_refuses_rows_of_several_clients(pefll, refused, models, tmp_path):  # noqa: F811
    rows, one = table(["ann", "bob"], seed=3), models / "ann.safetensors"
    rows.to_parquet(tmp_path / "rows.parquet")
    said = refused("predict", one, "--data", tmp_path / "rows.parquet", "--out", tmp_path / "a.csv", match="M034")
    assert "2 clients" in said
    assert "pefll predict FOLDER" in said
    assert not (tmp_path / "a.csv").exists()
    model = PersonalModel.load(one)
    for use in (model.predict, model.probabilities, model):
        with pytest.raises(PefllError, match=r"2 clients, by its column 'user_id'.*predict_each.*PEFLL-M039"):
            use(rows)
    mine = rows[rows.user_id == "ann"]
    assert (model.predict(mine) == model.predict(mine.drop(columns="user_id"))).all()
    mine.rename(columns={"user_id": "who"}).to_csv(tmp_path / "mine.csv", index=False)
    assert pefll("predict", one, "--data", tmp_path / "mine.csv", "--client-column", "who").code == 0


def test_each_row_gets_its_own_clients_model(models):
    rows = table(["eve", "ann", "bob"], seed=5)
    found = package.predict_each(models, rows)
    assert not found.errors
    assert (found.sample == np.arange(len(rows))).all()
    assert (found.client == rows.user_id).all()
    for user in ("ann", "bob", "eve"):
        mine = np.flatnonzero(rows.user_id == user)
        model = PersonalModel.load(models / file_name(user))
        np.testing.assert_array_equal(found.probabilities[mine], model.probabilities(rows.iloc[mine]))
        np.testing.assert_array_equal(found.predicted[mine], model.predict(rows.iloc[mine]))
    named = found.frame()
    each = [f"probability_{name}" for name in ("blue", "green", "red")]
    assert list(named.columns) == ["user_id", "sample", "predicted", "probability", *each]
    np.testing.assert_array_equal(named[each], found.probabilities)
    for taken in ("sample", "predicted", "probability", "probability_red"):
        frame = dataclasses.replace(found, client_column=taken).frame()
        assert (frame.client == rows.user_id).all(), "no column of predictions replaces that of clients"
        assert (frame[[taken]] == named[[taken]]).all(axis=None)
    assert found.metrics == {"accuracy": pytest.approx((named.predicted == rows.label).mean())}
    unlabelled = package.predict_each(models, rows.drop(columns="label"))
    assert unlabelled.metrics == {}
    np.testing.assert_array_equal(unlabelled.probabilities, found.probabilities)
    with ThreadPoolExecutor(4) as pool:
        for again in pool.map(lambda _: package.predict_each(models, rows), range(8)):
            np.testing.assert_array_equal(again.probabilities, found.probabilities)


def test_clients_without_a_model_or_with_faulty_rows_are_named(models):
    rows = table(["ann", "bob", "tom"])
    rows.loc[rows.index[rows.user_id == "bob"][0], "f2"] = np.inf
    with pytest.warns(UserWarning, match="2 of 3 clients got no predictions"):
        found = package.predict_each(models, rows)
    assert {user: error.code for user, error in found.errors.items()} == {"bob": "PEFLL-R113", "tom": "PEFLL-M046"}
    assert set(found.client) == {"ann"}
    assert (rows.user_id.iloc[found.sample] == "ann").all()
    (models / "ann.safetensors").write_bytes(b"no model")
    with pytest.raises(PefllError, match=r"none of 3 clients.*PEFLL-M049"):
        package.predict_each(models, rows)
    for content, code in (('{"models": 5}', "M044"), ("[", "PEFLL-"), ('{"models": []}', "M045")):
        (models / INDEX).write_text(content)
        with pytest.raises(PefllError, match=code):
            package.predict_each(models, rows)
    with pytest.raises(PefllError, match="M043"):
        package.predict_each(models.parent, rows)


def test_a_list_of_models_names_no_file_outside_its_folder(models, tmp_path):
    content = json.loads((models / INDEX).read_text())
    (models / "ann.safetensors").rename(tmp_path / "ann.safetensors")
    content["models"][0]["file"] = "../ann.safetensors"
    (models / INDEX).write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="M046"):
        assert set(package.predict_each(models, table(["ann", "bob"])).errors) == {"ann"}


def test_a_folder_of_models_by_command(pefll, refused, by_command, tmp_path):  # noqa: F811
    data, folder, target = tmp_path / "rows.parquet", tmp_path / "models", tmp_path / "answers.csv"
    frame = table(STRANGE)
    frame.to_parquet(data)
    said = pefll("personalize", by_command, "--data", data, "--each", "--out", folder)
    assert f"Next: pefll predict {folder} --data more_samples.parquet" in said.out
    said = pefll("predict", folder, "--data", data, "--out", target)
    assert said.code == 0
    assert f"{len(frame)} samples with a label are right" in said.out
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    each = [f"probability_{name}" for name in ("blue", "green", "red")]
    assert list(rows[0]) == ["user_id", "sample", "predicted", "probability", *each]
    assert all(row["probability"] == row[f"probability_{row['predicted']}"] for row in rows)
    assert sum(float(rows[0][name]) for name in each) == pytest.approx(1, abs=2e-6)
    assert pefll("predict", folder, "--data", data, "--out", target, "--force", "--no-each-class").code == 0
    assert target.read_text().splitlines()[0] == "user_id,sample,predicted,probability"
    assert [int(row["sample"]) for row in rows] == list(range(len(frame)))
    assert [row["user_id"].removeprefix("'") for row in rows] == frame.user_id.tolist()
    refused("predict", folder, "--data", data, "--out", target)
    more = pandas.concat([frame, table(["tom"])])
    more.rename(columns={"user_id": "who"}).drop(columns="label").to_parquet(tmp_path / "more.parquet")
    words = ("--data", tmp_path / "more.parquet", "--out", target, "--force")
    assert "M033" in refused("predict", folder, *words)
    said = pefll("predict", folder, *words, "--client-column", "who")
    assert said.code == 3
    assert "1 of 17 clients got no predictions: tom: " in said.err
    assert len(target.read_text().splitlines()) > len(frame)
    said = pefll("predict", folder, "--data", data)
    assert "sample 0, " in said.out
    assert "--out predictions.csv writes all" in said.out


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_other_tasks(pefll, tmp_path, task):  # noqa: F811
    frame = table(["ann", "bob"])
    frame["label"] = frame.f0 + 0.5
    frame["a"], frame["b"] = (frame.f1 > 0).astype(int), (frame.f2 > 0).astype(int)
    drop, label = (["a", "b"], "label") if task == "regression" else (["label"], ["a", "b"])
    federation = package.federation_from_frame(frame.drop(columns=drop), label, "user_id", unseen=0.5)
    run = package.fit(federation, rounds=1, local_steps=1, processes=1)
    folder = tmp_path / "models"
    write_each(run, run._owned(frame, None, None), folder)
    found = package.predict_each(folder, frame)
    assert (found.probabilities is None) == (task == "regression")
    if task == "multilabel":
        assert ((found.probabilities > 0.5) == found.predicted).all()
    assert found.metrics
    for user in ("ann", "bob"):
        mine = np.flatnonzero(frame.user_id == user)
        model = PersonalModel.load(folder / file_name(user))
        np.testing.assert_array_equal(found.predicted[mine], model.predict(frame.iloc[mine]))
    assert len(found.frame()) == len(frame)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    said = pefll("predict", folder, "--data", tmp_path / "rows.csv", "--out", tmp_path / "answers.csv")
    assert "24 samples with labels: " in said.out
    wanted = "user_id,sample," + ("predicted" if task == "regression" else "a,b")
    assert (tmp_path / "answers.csv").read_text().splitlines()[0] == wanted


def test_a_bad_cell_is_one_clients_fault(tmp_path):
    frame = pandas.DataFrame(users_table(12, 8, most=20))
    federation = package.federation_from_frame(frame, "liked", "user_id")
    run = package.fit(federation, rounds=1, clients_per_round=2, local_steps=1, processes=1)
    bad = frame.astype({"number_3": object})
    bad.loc[7, "number_3"] = "oops"
    user = bad.user_id[7]
    with pytest.raises(package.ClientsFailed, match=rf"{user}: .*'number_3' has the text 'oops' in row 8 .*D587"):
        run.personalize_each(bad)
    written = write_each(run, run._owned(bad, None, None), tmp_path / "models")
    assert set(written.errors) == {user}
    assert len(written.made) == 11
    write_each(run, run._owned(frame, None, None), tmp_path / "models")
    with pytest.warns(UserWarning, match="in row 8 where a number is needed"):
        found = package.predict_each(tmp_path / "models", bad)
    assert set(found.errors) == {user}
    with pytest.raises(PefllError, match=r"row 8 .*D587"):
        run.evaluate(federation=bad)


def test_a_model_of_another_client_under_a_clients_name_is_refused(models):
    """Files were mixed up: a client's predictions would come from the model of another one."""
    rows = table(["ann", "bob", "eve"])
    (models / file_name("ann")).write_bytes((models / file_name("bob")).read_bytes())
    with pytest.warns(UserWarning, match="1 of 3 clients got no predictions"):
        found = package.predict_each(models, rows)
    assert set(found.client) == {"bob", "eve"}
    assert found.errors["ann"].code == "PEFLL-M057"
    index = json.loads((models / INDEX).read_text())
    for row in index["models"]:  # as an earlier version wrote it; the files say whose they are
        row.pop("made_from")
    (models / INDEX).write_text(json.dumps(index))
    with pytest.warns(UserWarning, match="1 of 3 clients got no predictions"):
        assert package.predict_each(models, rows).errors["ann"].code == "PEFLL-M057"


def test_a_model_knows_its_client_and_refuses_the_rows_of_another(pefll, refused, models, tmp_path):  # noqa: F811
    data, file = tmp_path / "bob.parquet", models / "ann.safetensors"
    rows = table(["bob"], seed=3)
    rows.to_parquet(data)
    model = PersonalModel.load(file)
    assert model.spec.client == "ann"
    assert "client: 'ann'" in repr(model)
    with pytest.raises(PefllError, match="'bob'") as error:
        model.predict(rows)
    assert error.value.code == "PEFLL-M058"
    assert "--any-client" in refused("predict", file, "--data", data, match="M058")
    assert pefll("predict", file, "--data", data, "--any-client").code == 0
    refused("certify", file, "--data", data, match="M058")
    without = model.predict(rows.drop(columns="user_id"))
    refused("predict", models, "--data", data, "--any-client", match="C643")
    with pytest.raises(PefllError, match="PEFLL-M058") as error:
        model.of_client("x" * 10_000_000).predict(rows)
    assert len(str(error.value)) < 1000
    assert len(repr(model.of_client("x" * 10_000_000))) < 1000
    spec = dataclasses.replace(model.spec, client=None)  # a file of an earlier version
    np.testing.assert_array_equal(PersonalModel(model.network, spec).predict(rows), without)


def test_values_in_another_unit_give_one_note(pefll, models, tmp_path):  # noqa: F811
    rows = table(["ann", "bob", "eve"], seed=3)
    rows.assign(f1=rows.f1 * 5 + 400).to_csv(tmp_path / "rows.csv", index=False)
    said = pefll("predict", models, "--data", tmp_path / "rows.csv")
    assert said.err.count("note: ") == 1
    assert "'f1' (median 40" in said.err
    model, mine = PersonalModel.load(models / "ann.safetensors"), rows[rows.user_id == "ann"]
    with pytest.warns(UserWarning, match="'f1'"):
        model.predict(mine.assign(f1=mine.f1 + 1000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(mine)
        model.predict(mine.assign(f1=mine.f1 + 40))  # a client of its own
        package.predict_each(models, rows)


def test_a_list_of_models_of_40_gb_is_not_read(models):
    with (models / INDEX).open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(PefllError, match="at most") as error:
        package.predict_each(models, table(["ann"]))
    assert error.value.code == "PEFLL-A105"
