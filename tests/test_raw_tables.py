"""From a raw table of users by one command to personal models that take raw rows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import pefll as package
from benchmarks.users_table import command, users_table
from pefll.core.errors import PefllError
from pefll.data import read_samples
from pefll.data.frames import inputs_of
from pefll.runs import modelfile
from pefll.runs.config import Config
from tests.cli.conftest import pefll, refused  # noqa: F401

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def frame():
    return pandas.DataFrame(users_table(40, 8, most=30))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, frame):
    """A run on raw columns, given in Python, by its folder."""
    folder = tmp_path_factory.mktemp("raw") / "run"
    federation = package.federation_from_frame(frame, "liked", "user_id", drop=["number_7"])
    package.fit(federation, rounds=2, clients_per_round=3, local_steps=1, processes=1, out=folder)
    return folder


def test_raw_rows_in_and_predictions_out(trained, frame, tmp_path):
    run, mine = package.load(trained), frame[frame.user_id == "user-00003"]
    personal = run.personalize(mine)
    personal.save(tmp_path / "me.safetensors")
    again = package.PersonalModel.load(tmp_path / "me.safetensors")
    raw = mine.drop(columns=["liked", "user_id", "number_7"])
    wanted = personal.probabilities(raw)
    for rows in (raw, raw[raw.columns[::-1]], raw.to_dict("list"), raw.assign(note="x")):
        np.testing.assert_array_equal(again.probabilities(rows), wanted)
    assert np.isfinite(again.probabilities(raw.assign(city="Atlantis", plan=None, number_0=np.nan))).all()
    with pytest.raises(PefllError, match=r"'city'.*PEFLL-M030"):
        again.predict(raw.drop(columns="city"))
    with pytest.raises(PefllError, match=r"'city'.*PEFLL-M581"):
        again.predict(np.zeros((2, 10)))
    with pytest.raises(PefllError, match=r"'number_0'.*PEFLL-R113"):
        again.predict(raw.assign(number_0=np.inf))
    import torch

    with pytest.raises(PefllError, match="PEFLL-M580"):
        again.predict(torch.full((2, run.model_spec.input_shape[0]), 11.0))
    assert len(run.personalize_each(frame)) == frame.user_id.nunique()


def test_a_damaged_plan_in_a_file_is_one_sentence(trained, frame, tmp_path):
    personal = package.load(trained).personalize(frame[frame.user_id == "user-00003"])
    personal.spec.table["columns"][0]["deviation"] = -1.0
    with pytest.raises(PefllError, match="PEFLL-M016"):
        personal.save(tmp_path / "me.safetensors")
    assert not (tmp_path / "me.safetensors").exists()
    content = modelfile.to_bytes(personal.network.state_dict(), json.dumps(personal.spec.to_json()))
    (tmp_path / "theirs.safetensors").write_bytes(content)
    with pytest.raises(PefllError, match="PEFLL-M017"):
        package.PersonalModel.load(tmp_path / "theirs.safetensors")


def test_from_a_raw_file_to_predictions_by_commands(pefll, frame, tmp_path):  # noqa: F811
    data, run = tmp_path / "users.csv", tmp_path / "run"
    frame.assign(joined="2024-02-03").to_csv(data, index=False)
    (tmp_path / "new.txt").write_text("user-00003\nuser-00004\n")
    words = (
        "train",
        "--data",
        data,
        "--label",
        "liked",
        "--client-column",
        "user_id",
        "--data-dir",
        tmp_path / "cache",
    )
    more = ("--rounds", 1, "--clients-per-round", 2, "--processes", 1, "--set", "local_steps=1", "--out", run)
    said = pefll(*words, *more)
    assert said.code == 2
    assert "PEFLL-D585" in said.err
    assert not run.exists()
    summary = pefll("data", "summary", *words[2:], "--treat", "joined=date")
    assert "column 'joined': date, left out: it has one value only" in summary.out
    given = ("--drop", "joined", "--min-samples", 5, "--unseen-clients", tmp_path / "new.txt")
    said = pefll(*words, *given, *more)
    assert said.code == 0
    assert "left out, with fewer than 5 samples" in said.err
    assert "column 'number_0': number, standardised" in said.err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_unseen"] == 2
    rows = json.loads((run / "columns.json").read_text())["columns"]
    assert [row["column"] for row in rows] == [f"number_{n}" for n in range(8)] + ["city", "plan", "device", "liked"]
    assert rows[-1]["kind"] == "label"
    assert f"label 'liked': {rows[-1]['done']}\n" in said.err
    shown = pefll("show", run, "--out", tmp_path / "pictures")
    assert "Columns of run" in shown.out
    assert ["liked", "label"] in [line.split()[:2] for line in shown.out.splitlines()]
    one = tmp_path / "one.parquet"
    frame[frame.user_id == "user-00003"].to_parquet(one)
    assert pefll("personalize", run, "--data", one, "--out", tmp_path / "m.safetensors").code == 0
    said = pefll("predict", tmp_path / "m.safetensors", "--data", one)
    assert said.code == 0
    assert "right" in said.out
    assert pefll("evaluate", run).code == 0, "the same rows, encoded again, have the run's fingerprint"
    said = pefll("train", "--resume", run, "--drop", "city")
    assert said.code == 2
    assert "PEFLL-R104" in said.err


def test_rows_without_labels_are_predicted_and_do_not_stop_a_model(pefll, trained, frame, tmp_path):  # noqa: F811
    model, answers = tmp_path / "me.safetensors", tmp_path / "answers.csv"
    mine = frame[frame.user_id == "user-00003"].reset_index(drop=True)

    def written(name, liked):
        mine.assign(liked=liked).to_csv(tmp_path / name, index=False)
        return tmp_path / name

    some = mine.liked.astype(object).where(mine.index % 2 == 0)
    full, part, empty = written("full.csv", mine.liked), written("part.csv", some), written("empty.csv", None)
    assert pefll("personalize", trained, "--data", full, "--out", model).code == 0
    found = {}
    for data in (full, part, empty):
        said = pefll("predict", model, "--data", data, "--out", answers, "--force")
        assert said.code == 0, said.err
        found[data] = (answers.read_text(), said.out)
    assert found[part][0] == found[empty][0] == found[full][0]
    assert f"% of {len(mine[::2])} samples with a label" in found[part][1]
    assert "unknown" in found[empty][1]
    run = package.load(trained)
    with pytest.warns(UserWarning, match=f"{len(mine[1::2])} of {len(mine)} samples left out"):
        personal = run.personalize(mine.assign(liked=some))
    wanted = run.personalize(mine[::2])
    np.testing.assert_array_equal(personal.probabilities(mine), wanted.probabilities(mine))
    with pytest.raises(PefllError, match="PEFLL-T122"):
        run.personalize(mine.assign(liked=None))
    assert "PEFLL-M053" in pefll("personalize", trained, "--data", empty, "--out", tmp_path / "x.safetensors").err
    holes = frame.assign(liked=frame.liked.astype(object).where(np.arange(len(frame)) % 3 > 0))
    holes.to_csv(tmp_path / "all.csv", index=False)
    said = pefll("personalize", trained, "--data", tmp_path / "all.csv", "--each", "--out", tmp_path / "models")
    assert (said.code, said.err.count("left out")) == (0, 1), said.err
    assert len(list((tmp_path / "models").glob("*.safetensors"))) == frame.user_id.nunique()


def test_a_table_without_rows_is_one_sentence(pefll, trained, frame, tmp_path):  # noqa: F811
    run, none = package.load(trained), frame[:0]
    model = run.personalize(frame[frame.user_id == "user-00003"])
    for use in (run.personalize, run.embedder().describe, model.predict, run.personalize_each, run.federation_from):
        with pytest.raises(PefllError) as error:
            use(none)
        assert "\n" not in str(error.value)
    none.to_csv(tmp_path / "none.csv", index=False)
    for words in (("personalize", trained, "--out", tmp_path / "x"), ("evaluate", trained)):
        said = pefll(*words, "--data", tmp_path / "none.csv")
        assert (said.code, said.err.count("\n"), "Traceback" in said.err) == (2, 1, False), said.err


def test_a_file_named_after_a_client_is_found_by_its_name(pefll, trained, frame, tmp_path):  # noqa: F811
    """Files of names with capital letters have a hash in their names, and the error did not say so."""
    mine = frame[frame.user_id == "user-00003"].assign(user_id="USER-3")
    mine.to_parquet(tmp_path / "mine.parquet")
    said = pefll("personalize", trained, "--data", tmp_path / "mine.parquet", "--each", "--out", tmp_path / "models")
    assert said.code == 0, said.err
    said = pefll("predict", tmp_path / "models" / "USER-3.safetensors", "--data", tmp_path / "mine.parquet")
    assert said.code == 2
    (own,) = (tmp_path / "models").glob("*.safetensors")
    assert f"the model of client USER-3 is {own} [PEFLL-R108]" in said.err
    assert pefll("predict", own, "--data", tmp_path / "mine.parquet").code == 0
    said = pefll("predict", tmp_path / "models" / "nobody.safetensors", "--data", tmp_path / "mine.parquet")
    assert "nobody.safetensors [PEFLL-R108]" in said.err


def test_a_run_that_needs_no_labels_uses_all_rows(frame, tmp_path):
    federation = package.federation_from_frame(frame, "liked", "user_id")
    run = package.fit(federation, rounds=1, clients_per_round=2, processes=1, local_steps=1, embedding="mlp-unlabeled")
    mine = frame[frame.user_id == "user-00003"]
    holes = mine.assign(liked=mine.liked.astype(object).where(np.arange(len(mine)) > 0))
    wanted = run.personalize(mine).probabilities(mine)
    for rows in (holes, mine.assign(liked=None), mine.drop(columns="liked")):
        np.testing.assert_array_equal(run.personalize(rows).probabilities(rows), wanted)


def test_another_table_is_encoded_with_the_plan_of_the_run(pefll, trained, frame, tmp_path):  # noqa: F811
    run = package.load(trained)
    rng = np.random.default_rng(0)
    other = frame[frame.user_id < "user-00020"].assign(number_0=lambda rows: 3 * rows.number_0 + 7)
    other.loc[other.index[::5], "city"] = "Atlantis"
    other.loc[other.index[::7], "number_1"] = np.nan
    made = run.federation_from(other)
    np.testing.assert_array_equal(made.x.numpy(), inputs_of(other, (), made.table, "t"))
    assert (
        made.table.to_json()
        == package.federation_from_frame(frame, "liked", "user_id", drop=["number_7"]).table.to_json()
    )
    assert (made.num_seen, made.num_clients) == (0, other.user_id.nunique())
    evaluation = run.evaluate(federation=other)
    assert evaluation.seen is None
    assert evaluation == run.evaluate(federation=made)
    path = tmp_path / "other.csv"
    shuffled = other[rng.permutation(other.columns)].rename(columns={"user_id": "who"})
    shuffled.to_csv(path, index=False)
    said = pefll("evaluate", trained, "--data", path, "--client-column", "who", "--json")
    assert json.loads(said.out)["unseen"]["per_sample"] == pytest.approx(evaluation.unseen.per_sample)
    assert json.loads(said.out)["seen"] is None
    # A user's model is that of `personalize` with the user's training rows.
    name = made.name_of(2)
    rows = other.iloc[np.sort(made.indices(2).numpy())]
    np.testing.assert_allclose(
        run.model_of(name, federation=other).probabilities(rows), run.personalize(rows).probabilities(rows), rtol=1e-4
    )
    assert len(run.predictions(name, federation=other).frame()) == int(made.count[2, 2])
    own = package.federation_from_frame(other, "liked", "user_id")
    for wrong, code in (
        (own, "PEFLL-T580"),
        (other.drop(columns="city"), "PEFLL-M030"),
        (other.drop(columns="user_id"), "PEFLL-M033"),
        (other.assign(liked="maybe"), "PEFLL-D108"),
        (other.assign(liked=None), "PEFLL-T641"),
        (7, "PEFLL-A019"),
    ):
        with pytest.raises(PefllError) as error:
            run.evaluate(federation=wrong)
        assert error.value.code == code
    with pytest.raises(PefllError, match="PEFLL-T640"):
        run.federation_from(7)
    with pytest.warns(UserWarning, match="left out, because they have no label"):
        assert len(run.federation_from(other.assign(liked=other.liked.where(other.number_2 > 0))).rows) < len(other)
    assert "PEFLL-C640" in pefll("evaluate", trained, "--label", "liked").err


@pytest.mark.parametrize("in_python", [True, False])
def test_another_table_is_split_by_the_time_of_the_run(pefll, frame, tmp_path, in_python):  # noqa: F811
    """Each client's latest rows are its test samples, as in training."""
    timed = frame.assign(day=np.random.default_rng(0).permutation(len(frame)))
    settings = {"rounds": 1, "clients_per_round": 2, "processes": 1, "local_steps": 1}
    if in_python:
        federation = package.federation_from_frame(timed, "liked", "user_id", time="day")
        run = package.fit(federation, "fedavg", out=tmp_path / "run", **settings)
    else:
        timed.to_csv(tmp_path / "timed.csv", index=False)
        said = pefll(
            *("train", "--data", tmp_path / "timed.csv", "--label", "liked", "--client-column", "user_id"),
            *("--time-column", "day", "--method", "fedavg", "--rounds", 1, "--clients-per-round", 2, "--processes", 1),
            *("--set", "local_steps=1", "--out", tmp_path / "run"),
        )
        assert said.code == 0, said.err
    loaded = package.load(tmp_path / "run")
    for trained in (run, loaded) if in_python else (loaded,):
        made = trained.federation_from(timed)
        for client in range(made.num_clients):
            days = [timed.day.to_numpy()[made.indices(client, split).numpy()] for split in range(3)]
            assert max(days[0]) < min(days[2], default=len(timed))
    with pytest.raises(PefllError, match=r"no column 'day'.*PEFLL-T642"):
        loaded.evaluate(federation=frame)
    split = frame.assign(split=np.resize(["train", "train", "test"], len(frame)))
    assert loaded.evaluate(federation=split).unseen is not None, "a table with splits needs no time"


def test_an_empty_column_of_labels_is_not_called_absent(pefll, trained, frame, tmp_path):  # noqa: F811
    run = package.load(trained)
    for rows, why in (
        (frame.assign(liked=None), "the table has no row with a label in 'liked'"),
        (frame.drop(columns="liked"), "the table has no column 'liked' of labels"),
    ):
        with pytest.raises(PefllError, match=f"{why}, so nothing can be scored.*PEFLL-T641"):
            run.evaluate(federation=rows)
    some = frame.assign(other=None)
    with pytest.raises(PefllError, match=r"no columns 'b' and 'c' of labels"):
        run.federation_from(some, label="other,b,c")
    mine = frame[frame.user_id == frame.user_id.iloc[0]]
    mine.to_csv(tmp_path / "mine.csv", index=False)
    mine.assign(liked=None).to_csv(tmp_path / "empty.csv", index=False)
    said = pefll("personalize", trained, "--data", tmp_path / "empty.csv", "--out", tmp_path / "m.safetensors")
    assert re.search(r"no row with a label in 'liked', but.*PEFLL-M053", said.err)
    assert pefll("personalize", trained, "--data", tmp_path / "mine.csv", "--out", tmp_path / "m.safetensors").code == 0
    said = pefll("predict", tmp_path / "m.safetensors", "--data", tmp_path / "empty.csv")
    assert "The accuracy is unknown: empty.csv has no row with a label in 'liked'" in said.out


def test_names_of_columns_of_another_table_are_texts_or_lists(trained, frame):
    run = package.load(trained)
    assert run.federation_from(frame, label=["liked"]).num_clients == frame.user_id.nunique()
    for wrong in ({"label": 3}, {"client": 3}, {"label": ["liked", 3]}):
        with pytest.raises(PefllError, match="PEFLL-A008"):
            run.federation_from(frame, **wrong)


def test_pefll_is_ahead_on_unseen_users_of_a_raw_table(pefll, tmp_path):  # noqa: F811
    """The small form of `python -m benchmarks.users_table`: one command per method from the raw Parquet file."""
    data = tmp_path / "users.parquet"
    pandas.DataFrame(users_table(250, 5, groups=2, most=16)).to_parquet(data)
    unseen = {}
    for method, more in (
        ("pefll", ["--set", "client_lr=0.05", "--set", "local_steps=10", "--set", "descriptor_size=4"]),
        ("fedavg", []),
        ("local", ["--processes", "1"]),
    ):
        common = ["--data-dir", str(tmp_path), "--unseen", "0.2", "--clients-per-round", "10"]
        words = command(method, data, 60, 0, [*common, "--eval-every", "20", *more])
        assert pefll(*words, "--out", tmp_path / method).code == 0
        summary = json.loads((tmp_path / method / "summary.json").read_text())
        unseen[method] = summary["accuracy"]["best"]["unseen"]["per_sample"]
    assert unseen["pefll"] > 0.05 + max(unseen["fedavg"], unseen["local"])


def test_bad_options(pefll, frame, tmp_path):  # noqa: F811
    data = tmp_path / "users.csv"
    frame.to_csv(data, index=False)
    words = ("train", "--data", data, "--label", "liked", "--client-column", "user_id", "--data-dir", tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("Zoë".encode("latin-1"))
    for option, value, code in (
        ("--treat", "city", "PEFLL-C580"),
        ("--unseen-clients", tmp_path / "latin.txt", "PEFLL-C581"),
        ("--unseen-clients", tmp_path / "empty.txt", "PEFLL-C582"),
        ("--missing", "ignore", "PEFLL-"),
        ("--encode", "some", "PEFLL-"),
    ):
        said = pefll(*words, option, value, "--out", tmp_path / "run")
        assert said.code == 2
        assert code in said.err
        assert "Traceback" not in said.err
    said = pefll("train", "--data", "digits", "--drop", "a", "--out", tmp_path / "run")
    assert "PEFLL-D598" in said.err
    assert not (tmp_path / "run").exists()


def test_other_separators_and_letters_are_named(tmp_path):
    path = tmp_path / "users.csv"
    path.write_text("a;label;client\n1,5;0;x\n2,5;1;y\n")
    with pytest.raises(PefllError, match=r"';'.*sep=';'.*PEFLL-D596"):
        read_samples(path)
    path.write_bytes("a,label,client\n1,0,Zoë\n2,1,y\n".encode("latin-1"))
    with pytest.raises(PefllError, match=r"Latin-1.*iconv.*PEFLL-D597"):
        read_samples(path)
    path.write_text("a;b,label,client\n1,0,x\n2,1,y\n")
    assert read_samples(path).feature_names == ("a;b",)


def test_runs_of_earlier_versions_have_columns_as_they_are(tmp_path):
    Config(data="users.csv").save(tmp_path / "config.toml")
    lines = (tmp_path / "config.toml").read_text().splitlines(keepends=True)
    (tmp_path / "config.toml").write_text("".join(line for line in lines if not line.startswith("encode")))
    assert Config.load(tmp_path / "config.toml").encode == "none"
    assert Config().encode == "auto"


def write_umlauts(path):
    rows = [f"{row},{row % 2},{name},Köln" for row, name in enumerate(["Zoë", "Åsa"] * 6)]
    path.write_text("\n".join(["alter,label,client,ort", *rows]), encoding="utf-8")
    return path


def test_names_that_are_not_ascii(tmp_path):
    samples = read_samples(write_umlauts(tmp_path / "größe.csv"))
    assert samples.client_names == ("Zoë", "Åsa")
    assert samples.table[1].values == ("Köln",)


@pytest.mark.slow  # starts Python
def test_names_that_are_not_ascii_in_a_locale_without_them(tmp_path):
    path = write_umlauts(tmp_path / "größe.csv")
    code = "import sys, pefll; print(pefll.read_samples(sys.argv[1]).client_names)"
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, env=env)
    assert said.stdout.decode().strip() == "('Zoë', 'Åsa')", said.stderr.decode()
