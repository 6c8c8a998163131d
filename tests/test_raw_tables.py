"""From a raw table of users by one command to personal models that take raw rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import pefll as package
from benchmarks.users_table import command, users_table
from pefll.core.errors import PefllError
from pefll.data import read_samples
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
    assert [row["column"] for row in rows] == [f"number_{n}" for n in range(8)] + ["city", "plan", "device"]
    shown = pefll("show", run, "--out", tmp_path / "pictures")
    assert "Columns of run" in shown.out
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


def test_pefll_is_ahead_on_unseen_users_of_a_raw_table(pefll, tmp_path):  # noqa: F811
    """The small form of `python -m benchmarks.users_table`: one command per method from the raw Parquet file."""
    data = tmp_path / "users.parquet"
    pandas.DataFrame(users_table(250, 5, groups=2, most=16)).to_parquet(data)
    unseen = {}
    for method, more in (
        ("pefll", ["--set", "server_lr=3e-3", "--set", "descriptor_size=4"]),
        ("fedavg", []),
        ("local", ["--processes", "1"]),
    ):
        common = ["--data-dir", str(tmp_path), "--unseen", "0.2", "--clients-per-round", "10"]
        words = command(method, data, tmp_path / method, 60, [*common, "--eval-every", "20", *more])
        assert pefll(*words).code == 0
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
