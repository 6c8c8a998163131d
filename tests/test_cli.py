"""The command line: every verb, and one sentence for everything a user can get wrong."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch

from pefll import checkpoint, cli, files, run
from pefll.data import load_samples
from pefll.personal import PersonalModel
from pefll.record import RunFolder
from tests.data import layouts

SMALL = [
    "--clients",
    "8",
    "--clients-per-round",
    "2",
    "--rounds",
    "4",
    "--eval-every",
    "2",
    "--processes",
    "1",
    "--set",
    "local_steps=2",
]
DIGITS = ["--data", "digits", "--model", "mlp", *SMALL]


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def pefll(monkeypatch, capsys):
    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["pefll", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return Said(end.value.code or 0, out, err)

    return call


@pytest.fixture
def refused(pefll):
    """Call, expect exit code 2 and exactly one sentence, and return it."""

    def call(*arguments: object) -> str:
        said = pefll(*arguments)
        assert said.code == 2, said
        assert said.err.count("\n") == 1, said.err
        assert said.err.startswith("error: ")
        assert "Traceback" not in said.err + said.out
        return said.err.removeprefix("error: ").rstrip("\n")

    return call


def trained(tmp_path_factory, name: str, *more: str) -> Path:
    folder = tmp_path_factory.mktemp("runs") / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pefll", "train", *DIGITS, *more, "--out", str(folder)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    return trained(tmp_path_factory, "labelled", "--checkpoint-every", "2")


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory):
    return trained(tmp_path_factory, "unlabelled", "--set", "embedding=mlp-unlabeled")


@pytest.fixture
def client(tmp_path):
    samples = load_samples("digits", Path("data"))
    path = tmp_path / "client.npz"
    np.savez(path, x=samples.x[:25], y=samples.y[:25])
    return path


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def features(path: Path, clients: int = 8, **changed: object) -> Path:
    """Samples of six features with their clients; parts can be replaced."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(clients * 12, 6)),
        "y": rng.integers(0, 3, clients * 12),
        "client": np.repeat(np.arange(clients), 12),
    }
    return npz(path, **arrays | changed)


# Every verb.


def test_train_evaluate_show(pefll, labelled, tmp_path):
    said = pefll("evaluate", labelled, "--json")
    result = json.loads(said.out)
    summary = RunFolder(labelled).summary()
    for group in ("seen", "unseen"):
        assert result[group] == pytest.approx(summary["accuracy"]["best"][group])
    said = pefll("evaluate", labelled, "--split", "validation")
    assert "validation accuracy" in said.out
    assert "worst tenth" in said.out
    said = pefll("evaluate", labelled, "--mask-labels")
    assert "masked" in said.out
    assert "worst tenth" not in said.out
    said = pefll("show", labelled, "--out", tmp_path)
    assert said.code == 0
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_train_says_what_came_out(pefll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pefll.progress.QUIET_SECONDS", 0.0)
    said = pefll("train", "--method", "fedavg", *DIGITS, "--seed", 5)
    assert said.code == 0
    assert "runs/digits-fedavg-5: best round" in said.out
    assert "Next: pefll show runs/digits-fedavg-5" in said.out
    assert "4/4" in said.err
    assert RunFolder(tmp_path / "runs/digits-fedavg-5").summary()["seed"] == 5


def test_local_trains_nothing_together(pefll, tmp_path):
    said = pefll("train", "--method", "local", *DIGITS[:-2], "--set", "epochs=1", "--out", tmp_path / "l")
    assert said.code == 0
    assert RunFolder(tmp_path / "l").summary()["rounds"] == 0
    assert pefll("train", "--resume", tmp_path / "l").code == 0


@pytest.mark.parametrize("partition", ["by-class 2", "dirichlet 0.5", "dirichlet 0.3/2"])
def test_partitions_are_kept_in_the_config_and_resumed(pefll, tmp_path, partition):
    assert pefll("train", *DIGITS, "--partition", partition, "--out", tmp_path / "r").code == 0
    assert RunFolder(tmp_path / "r").summary()["partition"] == partition
    assert pefll("train", "--resume", tmp_path / "r", "--rounds", 6).code == 0
    assert RunFolder(tmp_path / "r").summary()["rounds"] == 6


def test_ones_own_data_is_trained_resumed_evaluated_and_used(pefll, tmp_path):
    path = features(tmp_path / "my data.npz", client=np.repeat([f"user {i}" for i in range(8)], 12))
    out = tmp_path / "r"
    assert pefll("train", "--data", path, *SMALL[2:], "--unseen", 0.25, "--out", out).code == 0
    assert RunFolder(out).summary()["num_unseen"] == 2
    assert pefll("train", "--resume", out, "--rounds", 6).code == 0
    first = pefll("evaluate", out, "--json")
    assert json.loads(first.out)["unseen"] == pytest.approx(RunFolder(out).summary()["accuracy"]["best"]["unseen"])
    features(path, client=np.repeat(np.arange(8), 12), y=np.zeros(96, dtype=np.int64))
    said = pefll("evaluate", out)
    assert said.code == 2
    assert "is not what" in said.err


def test_a_model_by_import_path(pefll, tmp_path, client):
    out = tmp_path / "r"
    assert pefll("train", *DIGITS, "--model", "tests.models.zoo:tied", "--out", out).code == 0
    assert pefll("personalize", out, "--data", client, "--out", tmp_path / "m.safetensors").code == 0
    said = pefll("predict", tmp_path / "m.safetensors", "--data", client)
    assert said.code == 2  # a file does not choose which code is run
    assert "--model module:function" in said.err
    own = ("--model", "tests.models.zoo:tied")
    assert pefll("predict", tmp_path / "m.safetensors", "--data", client, *own).code == 0


def test_personalize_and_predict_by_files_are_the_python_api(pefll, refused, labelled, tmp_path, client):
    model, table = tmp_path / "me.safetensors", tmp_path / "p.csv"
    said = pefll("personalize", labelled, "--data", client, "--out", model)
    assert said.code == 0
    assert "a personal mlp from 25 samples" in said.out
    said = pefll("predict", model, "--data", client, "--out", table)
    assert said.code == 0
    with np.load(client) as arrays:
        x, y = arrays["x"], arrays["y"]
    chances = run.load(labelled).personalize(x, y).probabilities(x)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [int(row["sample"]) for row in rows] == list(range(25))
    assert [int(row["class"]) for row in rows] == chances.argmax(1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], chances.max(1), atol=1e-6)
    assert f"{100 * (chances.argmax(1) == y).mean():.1f}% of 25 samples are right" in said.out
    np.testing.assert_array_equal(PersonalModel.load(model).probabilities(x), chances)
    said = pefll("predict", model, "--data", client)
    assert said.out.count("sample ") == 20
    assert "and 5 more" in said.out
    np.savez(tmp_path / "other.npz", x=x, y=np.where(y == 0, 12, y))
    assert "labels are 1 to 12; the model knows 0..9" in refused("predict", model, "--data", tmp_path / "other.npz")


def test_class_names_with_commas_and_brackets(pefll, tmp_path):
    names = np.array(["plain", "with, comma", 'with "quotes"', "[bold]"])
    path = features(tmp_path / "named.npz", y=names[np.random.default_rng(0).integers(0, 4, 96)])
    out = tmp_path / "run[x]"
    said = pefll("train", "--data", path, *SMALL[2:], "--out", out)
    assert said.code == 0
    assert f"Next: pefll show {out}" in said.out
    assert "samples of 8 clients" in pefll("personalize", out, "--data", path, "--out", tmp_path / "m").err
    with np.load(path) as arrays:
        mine = arrays["client"] == arrays["client"][0]
        one = npz(tmp_path / "one.npz", x=arrays["x"][mine], y=arrays["y"][mine])
    assert pefll("personalize", out, "--data", one, "--out", tmp_path / "m").code == 0
    assert pefll("predict", tmp_path / "m", "--data", path, "--out", tmp_path / "p.csv").code == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    model = PersonalModel.load(tmp_path / "m")
    with np.load(path) as arrays:
        wanted = [model.facts["class_names"][c] for c in model.predict(arrays["x"].astype(np.float32))]
    assert [row["class"] for row in rows] == wanted
    assert {row["class"] for row in rows} <= set(names.tolist())
    shown = pefll("predict", tmp_path / "m", "--data", path).out
    assert f"sample 0: {wanted[0]} (" in shown


def test_personal_models_are_ordinary_modules(labelled, client):
    with np.load(client) as arrays:
        x, y = arrays["x"], arrays["y"]
    model = run.load(labelled).personalize(x, y)
    assert isinstance(model, torch.nn.Module)
    (mean,), (std,) = model.normalise
    plain = (x / 255 - mean) / std
    scores = model.network(torch.from_numpy(plain).float()).softmax(1)
    np.testing.assert_allclose(scores.detach().numpy(), model.probabilities(x), atol=1e-5)


def test_a_client_without_labels(pefll, refused, labelled, unlabelled, tmp_path):
    x = load_samples("digits", Path("data")).x[:9]
    bare = npz(tmp_path / "bare.npz", x=x)
    sentence = refused("personalize", labelled, "--data", bare, "--out", tmp_path / "m")
    assert "needs labels" in sentence
    assert "--set embedding=convnet-unlabeled" in sentence
    assert not (tmp_path / "m").exists()
    said = pefll("personalize", unlabelled, "--data", bare, "--out", tmp_path / "m")
    assert said.code == 0
    assert "right" not in said.out
    # And labels would not have made a difference.
    full = npz(tmp_path / "full.npz", x=x, y=np.arange(9))
    assert pefll("personalize", unlabelled, "--data", full, "--out", tmp_path / "n").code == 0
    a, b = (safetensors.torch.load_file(tmp_path / name) for name in "mn")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_methods(pefll):
    said = pefll("methods")
    assert said.code == 0
    for name in ("pefll", "fedavg", "local", "lambda_theta", "client_lr", "epochs"):
        assert name in said.out
    assert "lambda_theta" not in pefll("methods", "fedavg").out


def test_data_verbs(pefll, tmp_path):
    listed = pefll("data", "list", "--data-dir", tmp_path).out
    assert "built in" in listed
    assert "cifar100" in listed
    assert "comes with the package" in pefll("data", "get", "digits", "--data-dir", tmp_path).out
    said = pefll("data", "check", tmp_path)
    assert said.code == 0
    assert "missing" in said.out
    said = pefll("data", "summary", "digits", "--clients", 6, "--picture", tmp_path / "p.png")
    assert said.code == 0
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_a_download_has_a_bar(pefll, tmp_path, monkeypatch):
    def get(name, data_dir, report):
        for done in (0, 50, 100):
            report(done, 100)
        return data_dir / name

    monkeypatch.setattr(cli.sources, "get", get)
    said = pefll("data", "get", "cifar10", "--data-dir", tmp_path)
    assert said.code == 0
    assert "100/100 bytes" in said.err
    assert f"{tmp_path / 'cifar10'} is here" in said.out


def test_version_and_help(pefll):
    assert pefll("--version").out.startswith("pefll 0.")
    assert "personalize" in pefll("--help").out
    said = pefll()
    assert said.code == 2
    assert "personalize" in said.out
    assert said.err == ""


def test_demo_passes_its_options_on(pefll, monkeypatch, tmp_path):
    import types

    calls = []
    stub = types.ModuleType("pefll.experiments.demo")
    stub.demo = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, "pefll.experiments.demo", stub)
    assert pefll("demo", "--out", tmp_path / "d", "--seeds", 1).code == 0
    assert calls == [(tmp_path / "d", 1, cli.out)]


def test_in_real_processes(tmp_path, client):
    def call(*arguments: object) -> Said:
        command = [sys.executable, "-m", "pefll", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        return Said(done.returncode, done.stdout, done.stderr)

    said = call("train", *DIGITS, "--engine", "serial", "--processes", 2, "--out", "r")
    assert said.code == 0, said.err
    assert call("personalize", "r", "--data", client, "--out", "m.safetensors").code == 0
    said = call("train", "--resume", "nowhere")
    assert said == Said(2, "", "error: nowhere is not a run folder: it has no config.toml\n")


def test_several_seeds_at_once(pefll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = pefll("train", *DIGITS, "--seeds", "0, 2")
    assert said.code == 0, said.err
    assert "Next: pefll show runs/digits-pefll" in said.out
    assert "mean" in said.out
    together = tmp_path / "runs" / "digits-pefll"
    for seed in (0, 2):
        assert pefll("train", *DIGITS, "--seed", seed, "--out", tmp_path / f"alone-{seed}").code == 0
        files = [next(folder.glob("checkpoints/*/state.safetensors")) for folder in
                 (together / f"seed-{seed}", tmp_path / f"alone-{seed}")]  # fmt: skip
        assert files[0].read_bytes() == files[1].read_bytes()
    assert "finished already" in pefll("train", "--resume", together).err
    assert pefll("train", "--resume", together, "--rounds", 6).code == 0
    assert [RunFolder(together / f"seed-{seed}").summary()["rounds"] for seed in (0, 2)] == [6, 6]
    said = pefll("results", "add", together, "--to", tmp_path / "results")
    assert said.out.count("wrote ") == 2
    said = pefll("results", "table", tmp_path / "results")
    assert said.out.count("| digits, 8 | pefll | 2 |") == 1
    said = pefll("show", together)
    assert said.code == 0
    assert "seed-2" in said.out
    assert (together / "curves.png").is_file()
    assert pefll("train", *DIGITS, "--seeds", "7").code == 0
    assert RunFolder(tmp_path / "runs" / "digits-pefll-2" / "seed-7").summary()["lockstep"] == 1


def test_one_seed_that_fails_among_several(pefll, tmp_path, monkeypatch):
    from pefll.engines.vector import VectorEngine
    from pefll.errors import PefllError

    launch = VectorEngine.launch

    def instead(self, server, first, rounds):
        if self.seed == 1 and first == 2:
            raise PefllError("it diverged")
        return launch(self, server, first, rounds)

    monkeypatch.setattr(VectorEngine, "launch", instead)
    said = pefll("train", *DIGITS, "--engine", "vector", "--seeds", "0,1", "--out", tmp_path / "r")
    assert said.code == 2
    assert "seed 1 failed: it diverged" in said.err
    assert said.err.endswith("error: 1 of 2 runs failed: seed 1: it diverged\n")
    assert "Test accuracy" in said.out
    assert RunFolder(tmp_path / "r" / "seed-0").summary() is not None


def test_scores_of_each_client(pefll, refused, labelled, tmp_path):
    said = pefll("evaluate", labelled, "--json", "--per-client", tmp_path / "c.csv")
    groups = json.loads(said.out)
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert [row["client"] for row in rows] == [str(number) for number in range(8)]
    for seen, group in (("1", "seen"), ("0", "unseen")):
        mine = [row for row in rows if row["seen"] == seen]
        for column, measure in (("correct", "per_sample"), ("masked", "masked"), ("loss", "loss")):
            total = sum(float(row[column]) for row in mine) / sum(int(row["samples"]) for row in mine)
            assert total == pytest.approx(groups[group][measure])
    assert float(rows[0]["accuracy"]) == pytest.approx(int(rows[0]["correct"]) / int(rows[0]["samples"]), abs=1e-6)
    assert pefll("evaluate", labelled, "--mask-labels", "--per-client", tmp_path / "m.csv").code == 0
    masked = list(csv.DictReader((tmp_path / "m.csv").open()))
    assert float(masked[0]["accuracy"]) == pytest.approx(int(rows[0]["masked"]) / int(rows[0]["samples"]), abs=1e-6)
    assert "cannot write" in refused("evaluate", labelled, "--per-client", tmp_path / "no" / "c.csv")


TUNE = ["tune", "--data", "digits", "--model", "mlp", "--clients", 8, "--clients-per-round", 2, "--rounds", 2,
        "--method", "fedavg", "--set", "local_steps=2", "--eval-every", 1]  # fmt: skip


def test_tuning(pefll, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = pefll(*TUNE, "--grid", "client_lr=1e-3,1e-1", "--seeds", "0,1", "--at-once", 2)
    assert said.code == 0, said.err
    assert "client_lr=0.001 seed 1: " in said.err.replace("local_steps=2 ", "")
    assert "is the largest that was tried" in said.out
    assert "wrote results/tune/digits-fedavg-n8.json" in said.out
    said = pefll(*TUNE, "--grid", "client_lr=1e-3,1e-1", "--seeds", "0,1")
    assert "0 runs are to be done" in said.err
    assert "--grid" in refused(*TUNE)
    assert "did you mean 'client_lr'" in refused(*TUNE, "--grid", "client_rl=1")
    assert "--at-once is 0; it must be at least 1" in refused(*TUNE, "--grid", "client_lr=7", "--at-once", 0)
    assert "unknown method 'fedav'" in refused(*TUNE, "--method", "fedav", "--grid", "client_lr=7")
    assert "was made with rounds = 2, not 3" in refused(*TUNE, "--grid", "client_lr=7", "--rounds", 3)


def test_stopping_a_search(pefll, tmp_path, monkeypatch):
    from pefll.experiments import tune
    from pefll.lockstep import Stopped

    def stopped(*given):
        raise Stopped(3, 15)

    monkeypatch.setattr(tune, "tune", stopped)
    said = pefll(*TUNE, "--grid", "client_lr=1", "--out", tmp_path)
    assert said.code == 128 + 15
    assert "The same command goes on." in said.err


def test_reproducing_a_table(pefll, refused, tmp_path, monkeypatch):
    from pefll.experiments import reproduce, table1

    cell = table1.Cell("digits", 10, "by-class 2", "Digits", 1100, model="mlp")
    monkeypatch.setattr(table1, "CELLS", (cell,))
    monkeypatch.setattr(table1, "recipe", lambda method, cell: {"local_steps": 2} if method == "fedavg" else {})
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "table1", "--only", "fedavg", "--rounds", 2, "--seeds", "0,1"]
    assert "2 runs are missing" in pefll(*words, "--dry-run").out
    assert "in this time" in pefll(*words, "--dry-run", "--budget", 5).out
    assert "--budget is 0.0; it must be more than 0 minutes" in refused(*words, "--budget", 0)
    assert not (tmp_path / "results").exists()
    said = pefll(*words)
    assert said.code == 0, said.err
    assert "2 of 2 runs done" in said.err
    assert (tmp_path / "runs/table1/digits-10-fedavg-local_steps_2/seed-1/summary.json").is_file()
    table = (tmp_path / "results/table1.md").read_text()
    assert re.search(r"\| FedAvg \| \d", table)  # not bold: there is nobody to be better than
    (tmp_path / "results/table1.md").unlink()
    assert "wrote results/table1.md" in pefll(*words, "--tables-only").out
    assert (tmp_path / "results/table1.md").read_text() == table
    assert "0 runs are missing" in pefll(*words, "--dry-run").out
    assert refused("reproduce", "table2") == "unknown experiment 'table2': did you mean 'table1'? known are table1"
    assert "unknown method or cell 'digits-11'" in refused("reproduce", "table1", "--only", "digits-11")
    assert "--seeds takes" in refused("reproduce", "table1", "--seeds", "a")

    def failing(*given, **more):
        return ["digits-10 fedavg seed 0: it diverged"]

    monkeypatch.setattr(reproduce, "run_missing", failing)
    said = pefll(*words)
    assert said.code == 2
    assert said.err == "error: 1 runs failed: digits-10 fedavg seed 0: it diverged\n"
    assert "wrote results/table1.md" in said.out


def test_what_a_new_client_pays(pefll, refused, labelled, tmp_path):
    fedavg = trained_beside(pefll, tmp_path)
    said = pefll("cost", labelled, fedavg, "--out", tmp_path / "c")
    assert said.code == 0, said.err
    assert "digits, 8 clients: a new client with" in said.out
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "c.csv").open())}
    theta = 4 * run.load(fedavg).method.problem.model.size
    assert rows["fedavg"]["bytes_down"] == str(theta)
    assert int(rows["pefll"]["bytes_down"]) > theta
    assert "| FedAvg |" in (tmp_path / "c.md").read_text()
    # A result file is as good as the run's folder.
    assert pefll("results", "add", fedavg, "--to", tmp_path / "results").code == 0
    (path,) = (tmp_path / "results").iterdir()
    for source in (path, tmp_path / "results"):
        assert pefll("cost", source, "--out", tmp_path / "d").code == 0
        (row,) = csv.DictReader((tmp_path / "d.csv").open())
        assert row | {"seconds": ""} == rows["fedavg"] | {"seconds": ""}
    # What differs by more than the seed is not one row, and says how it differs.
    other = json.loads(path.read_text())
    other["settings"]["client_lr"], other["precision"] = 0.125, "bf16"
    (tmp_path / "results" / "other.json").write_text(json.dumps(other))
    assert pefll("cost", tmp_path / "results", "--out", tmp_path / "e").code == 0
    table = (tmp_path / "e.md").read_text()
    assert "| FedAvg, client_lr 0.125, bf16 |" in table
    assert "| FedAvg, client_lr 0.01, float32 |" in table
    assert "not a run folder" in refused("cost", tmp_path)
    (tmp_path / "no.json").write_text("[]")
    assert "is not a result" in refused("cost", tmp_path / "no.json")
    (fedavg / "summary.json").unlink()
    assert "is not finished" in refused("cost", fedavg)


def trained_beside(pefll, tmp_path) -> Path:
    assert pefll("train", *DIGITS, "--method", "fedavg", "--out", tmp_path / "fedavg").code == 0
    return tmp_path / "fedavg"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["--seeds", "0,0"],
            "--seeds takes different whole numbers with commas between them, such as 0,1,2, not '0,0'",
        ),
        (["--seeds", "0;1"], "not '0;1'"),
        (["--seeds", ""], "not ''"),
        (["--seeds", "0,-1"], "not '0,-1'"),
        (["--seeds", "0,1", "--seed", "3"], "in place of --seed"),
    ],
)
def test_seeds_that_are_none(refused, tmp_path, arguments, part):
    assert part in refused("train", *DIGITS, *arguments, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_folders_that_hold_seeds_already(pefll, refused, labelled, tmp_path):
    assert pefll("train", *DIGITS, "--seeds", "0,1", "--out", tmp_path / "r").code == 0
    for more in (["--seeds", "0,1"], ["--seeds", "5"], ["--seed", "5"]):
        assert "already holds a run" in refused("train", *DIGITS, *more, "--out", tmp_path / "r")
    assert "already holds a run" in refused("train", *DIGITS, "--seeds", "0,1", "--out", labelled)
    assert "in place of --seed" in refused("train", "--resume", tmp_path / "r", "--seeds", "0,1")
    assert "holds runs of several seeds" in refused("evaluate", tmp_path / "r")
    assert "cannot be resumed with 7" in refused("train", "--resume", tmp_path / "r", "--seed", "7")


# What users get wrong.


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--method", "pefl"], "unknown method 'pefl': did you mean 'pefll'?"),
        (["--data", "digit"], "unknown data set 'digit': did you mean 'digits'?"),
        (["--data", "./none.npz"], "there is no file or folder none.npz"),
        (["--model", "lenett"], "unknown model 'lenett': did you mean 'lenet'?"),
        (["--model", "lenet"], "images of 8x8 are too small for 5x5 convolutions"),
        (["--model", "lstm"], "does not accept samples of shape (1, 8, 8)"),
        (["--model", "nowhere:f"], "cannot import the model 'nowhere:f'"),
        (["--model", "tests.models.zoo:too_wide"], "gives (12,) scores per sample but there are 10 classes"),
        (["--nope"], "No such option"),
        (["--engine", "flower"], "only a Flower app reaches clients on other machines"),
        (["--rounds", "many"], "--rounds"),
        (["--rounds", "-1"], "rounds is -1; it cannot be negative"),
        (["--unseen", "1.5"], "unseen is 1.5"),
        (["--set", "server_rl=1"], "unknown hyper-parameter of pefll 'server_rl': did you mean 'server_lr'?"),
        (["--set", "server_lr"], "--set takes NAME=VALUE, not 'server_lr'"),
        (["--set", "=3"], "--set takes NAME=VALUE"),
        (["--set", "server_lr=fast"], "pefll: server_lr must be float, not 'fast'"),
        (["--set", "local_steps=2.5"], "local_steps must be int"),
        (["--set", "local_steps=0"], "local_steps must be at least 1"),
        (["--set", "embedding=cnvnet"], "unknown embedding network 'cnvnet'"),
        (["--set", "hypernetwork=XL"], "unknown hypernetwork size 'XL'"),
        (["--method", "local", "--set", "batch_size=0"], "batch_size must be at least 1"),
        (["--partition", "by-classes 2"], "unknown partition 'by-classes 2'"),
        (["--partition", "natural"], "digits has no natural clients"),
        (["--clients-per-round", "9"], "9 clients per round were asked for, but only 7 clients take part in training"),
        (["--engine", "vectr"], "unknown engine 'vectr': did you mean 'vector'?"),
        (["--precision", "half"], "unknown precision 'half'"),
        (["--device", "tpu"], "tpu"),
        (["--device", "meta"], "is not supported"),
        (["--eval-every", "0"], "eval_every is 0"),
    ],
)
def test_arguments_that_are_wrong(refused, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    base = [word for word in DIGITS if not (arguments[0] == "--method" and word in ("--set", "local_steps=2"))]
    assert part in refused("train", *base, *arguments, "--out", "r")
    assert not Path("r").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_where_there_is_none(refused, tmp_path, device):
    sentence = refused("train", *DIGITS, "--device", device, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert sentence == "CUDA was asked for, but torch sees no CUDA device here; use --device cpu"


def test_verbs_and_names_that_are_wrong(refused, labelled, tmp_path):
    assert "'train'" in refused("trian")
    assert "did you mean 'fedavg'" in refused("methods", "fedavgg")
    assert "did you mean 'test'" in refused("evaluate", labelled, "--split", "tset")
    assert "unknown data set 'mnist'" in refused("data", "get", "mnist", "--data-dir", tmp_path)
    assert "there is no folder" in refused("data", "check", tmp_path / "none")
    assert "not a run folder" in refused("show", tmp_path)
    assert "not a run folder" in refused("evaluate", tmp_path)
    assert "not a run folder" in refused("personalize", tmp_path, "--data", tmp_path, "--out", tmp_path / "m")


@pytest.mark.parametrize("state", ["missing", "empty", "half", "wrong md5", "archive cut"])
def test_data_folders_that_are_wrong(refused, pefll, tmp_path, state):
    folder = tmp_path / "data"
    part = "there is neither"
    if state != "missing":
        folder.mkdir()
    if state in ("half", "wrong md5"):
        layouts.cifar10(folder, each=3)
        part = "is not the official file (wrong md5)"
    if state == "half":
        (folder / "cifar-10-batches-py" / "data_batch_4").unlink()
        part = "lacks data_batch_4; run `pefll data get cifar10`"
    if state == "archive cut":
        (folder / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b\x08\x00half of an archive")
        part = "is damaged"
    arguments = ("train", "--data", "cifar10", "--data-dir", folder, *SMALL, "--out", tmp_path / "r")
    said = pefll(*arguments)
    assert said.code == 2
    *notes, error = said.err.splitlines()
    assert error.startswith("error: ")
    assert part in error
    assert all("reading" in note or "cifar10" in note for note in notes)
    assert not (tmp_path / "r").exists()
    if state in ("half", "wrong md5", "archive cut"):
        said = pefll("data", "check", folder)
        assert said.code == 2
        assert "damaged" in said.out


RNG = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"y": np.zeros(95, dtype=np.int64)}, "x has 96 samples but y has 95; they must be equal"),
        ({"client": np.zeros(90, dtype=np.int64)}, "client has 90"),
        ({"y": np.full(96, -1)}, "there is a label -1"),
        ({"y": np.full(96, 0.5)}, "label 0.5 of sample 0 is not a whole number"),
        ({"y": np.full(96, np.nan)}, "is not a whole number"),
        ({"y": np.r_[np.zeros(95, dtype=np.int64), 10**6]}, "there is a label 1,000,000 among 96 samples"),
        ({"y": np.zeros((96, 2), dtype=np.int64)}, "must have one entry per sample"),
        ({"x": np.where(np.arange(96 * 6).reshape(96, 6) == 77, np.nan, 1.0)}, "sample 12 of x has a NaN"),
        ({"x": np.full((96, 6), np.inf)}, "sample 0 of x has a NaN or infinite value"),
        ({"x": np.array([["a"] * 6] * 96)}, "it must hold numbers"),
        ({"x": np.zeros(96)}, "must have one row per sample"),
        ({"x": np.zeros((0, 6)), "y": np.zeros(0, dtype=int), "client": np.zeros(0, dtype=int)}, "no samples"),
        ({"split": np.repeat([0, 0, 0, 2, 0, 0, 0, 0], 12)}, "no training samples"),
        ({"split": np.full(96, 7)}, "splits must be 0 (train), 1 (validation) or 2 (test)"),
    ],
)
def test_ones_own_data_that_is_wrong(refused, tmp_path, changed, part):
    path = features(tmp_path / "mine.npz", **changed)
    assert part in refused("train", "--data", path, *SMALL[2:], "--out", tmp_path / "r")


def test_files_that_are_wrong(refused, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "a.txt").write_text("1 2 3")
    npz(tmp_path / "b.npz", x=np.zeros((3, 2)))
    npz(tmp_path / "c.npz", x=np.zeros((9, 2)), y=np.zeros(9, dtype=int))
    for name, part in (
        ("a.npz", "cannot be read as an .npz file"),
        ("a.txt", "is of no known kind"),
        ("b.npz", "has no array y"),
        ("c.npz", "does not say whose each sample is; add --partition"),
    ):
        assert part in refused("train", "--data", tmp_path / name, *SMALL[2:], "--out", tmp_path / "r")


def test_samples_unlike_the_training_data(refused, labelled, tmp_path):
    y = np.zeros(4, dtype=np.int64)
    wrong = {
        "other channels": (
            np.zeros((4, 3, 8, 8), np.uint8),
            y,
            "shape (3, 8, 8), but the run was trained on (1, 8, 8)",
        ),
        "other size": (np.zeros((4, 1, 9, 8), np.uint8), y, "shape (1, 9, 8)"),
        "floats": (np.zeros((4, 1, 8, 8)), y, "uint8 pixels 0..255"),
        "no such class": (np.zeros((4, 1, 8, 8), np.uint8), y + 10, "there is a label 10"),
        "more labels": (np.zeros((4, 1, 8, 8), np.uint8), np.zeros(5, dtype=np.int64), "x has 4 samples but y has 5"),
    }
    for name, (x, labels, part) in wrong.items():
        path = npz(tmp_path / f"{name}.npz", x=x, y=labels)
        assert part in refused("personalize", labelled, "--data", path, "--out", tmp_path / "m"), name
    assert not (tmp_path / "m").exists()


def test_personalising_into_a_folder_that_is_not_there_yet(pefll, refused, labelled, client, tmp_path):
    assert pefll("personalize", labelled, "--data", client, "--out", tmp_path / "no" / "m.safetensors").code == 0
    assert (tmp_path / "no" / "m.safetensors").is_file()
    (tmp_path / "file").write_text("")
    said = refused("personalize", labelled, "--data", client, "--out", tmp_path / "file" / "m")
    assert "choose another place" in said
    assert "space" not in said
    assert ".safetensors" in refused("personalize", labelled, "--data", client, "--out", tmp_path / "m.pt")


def table(path: Path, label: str = "y", clients: int = 8) -> Path:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 96)
    x = rng.normal(size=(96, 2)) + y[:, None]
    rows = [f"{a},{b},{c},{n % clients}" for n, ((a, b), c) in enumerate(zip(x, y, strict=True))]
    path.write_text("\n".join([f"a,b,{label},client", *rows]))
    return path


def test_tables_whose_labels_have_another_name(pefll, refused, tmp_path):
    pytest.importorskip("pandas")
    named = table(tmp_path / "named.csv")
    small = (*SMALL[2:], "--out", tmp_path / "run")
    said = pefll("train", "--data", named, *small)
    assert said.code == 2
    assert "no column 'label' with labels; there are a, b, y, client: say which one it is with --label" in said.err
    assert pefll("train", "--data", named, "--label", "y", *small).code == 0
    one = table(tmp_path / "one.csv", clients=1)
    assert "--label" in refused("personalize", tmp_path / "run", "--data", one, "--out", tmp_path / "m")
    assert pefll("personalize", tmp_path / "run", "--data", one, "--label", "y", "--out", tmp_path / "m").code == 0
    assert "no column 'label'" in pefll("predict", tmp_path / "m", "--data", one).out
    assert "samples are right" in pefll("predict", tmp_path / "m", "--data", one, "--label", "y").out


def test_data_that_is_gone_or_has_changed(pefll, refused, tmp_path):
    path = features(tmp_path / "mine.npz")
    assert pefll("train", "--data", path, *SMALL[2:], "--out", tmp_path / "run").code == 0
    features(path, y=np.arange(96) % 3)
    assert f"what is in {path} is not what the run was trained on" in refused("evaluate", tmp_path / "run")
    path.unlink()
    assert f"{path}, which is not there any more" in refused("evaluate", tmp_path / "run")


def test_accuracies_that_nobody_can_measure(pefll, tmp_path):
    alone = features(tmp_path / "alone.npz", client=np.arange(96))
    said = pefll("train", "--data", alone, *SMALL[2:], "--out", tmp_path / "alone")
    assert "No client has a test sample" in said.out
    few = features(tmp_path / "few.npz", clients=3)
    said = pefll("train", "--data", few, *SMALL[2:], "--out", tmp_path / "few", "--precision", "bf16")
    assert "--unseen" in said.out
    assert "float32 (only a GPU has bf16)" in said.err


def test_models_that_are_none(pefll, refused, labelled, client, tmp_path):
    assert "there is no file" in refused("predict", tmp_path / "none", "--data", client)
    (tmp_path / "text").write_text("hello")
    assert "is not a safetensors file, or it is damaged" in refused("predict", tmp_path / "text", "--data", client)
    assert "is not a safetensors file" in refused("predict", client, "--data", client)
    (tmp_path / "other").write_bytes(safetensors.torch.save({"a": torch.zeros(2)}))
    assert "is not a personal model" in refused("predict", tmp_path / "other", "--data", client)
    assert pefll("personalize", labelled, "--data", client, "--out", tmp_path / "m").code == 0
    content = (tmp_path / "m").read_bytes()
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        assert "damaged" in refused("predict", tmp_path / "cut", "--data", client)
    bad = npz(tmp_path / "bad.npz", x=np.zeros((2, 1, 7, 7), np.uint8))
    assert "trained on (1, 8, 8)" in refused("predict", tmp_path / "m", "--data", bad)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--seed", "9"], "started with seed = 0, and cannot be resumed with 9"),
        (["--set", "client_lr=1"], "started with settings"),
        (["--method", "fedavg"], "started with method = 'pefll'"),
        (["--clients", "9"], "started with clients = 8"),
        (["--eval-every", "3"], "started with eval_every"),
        (["--rounds", "2"], "it can be extended but not shortened"),
        (["--out", "elsewhere"], "leave --out away"),
        (["--set", "nothing=1"], "unknown hyper-parameter"),
    ],
)
def test_resuming_as_something_else(refused, labelled, arguments, part):
    before = checkpoint.latest(labelled / "checkpoints", pytest.fail)
    config = (labelled / "config.toml").read_bytes()
    assert part in refused("train", "--resume", labelled, *arguments)
    assert (labelled / "config.toml").read_bytes() == config
    assert checkpoint.latest(labelled / "checkpoints", pytest.fail).round == before.round


def test_folders_that_are_no_place_for_a_run(refused, labelled, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert "exists and is not a run folder" in refused("train", *DIGITS, "--out", tmp_path / name)
    assert "already holds a run" in refused("train", *DIGITS, "--out", labelled)
    assert "is not a run folder" in refused("train", "--resume", tmp_path / "full")
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "a").read_text() == "mine"


def test_runs_that_are_damaged(pefll, refused, labelled, client, tmp_path):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(labelled, folder)
    good = pefll("evaluate", folder, "--json").out
    newest, older = sorted((folder / "checkpoints").iterdir(), reverse=True)
    state = newest / checkpoint.TENSORS
    state.write_bytes(state.read_bytes()[:1000])
    said = pefll("evaluate", folder, "--json")
    assert said.code == 0
    assert "is damaged: state.safetensors has 1,000 bytes" in said.err
    assert json.loads(said.out).keys() == json.loads(good).keys()
    (older / checkpoint.MANIFEST).write_text("{")
    for arguments in (
        ("evaluate", folder),
        ("train", "--resume", folder),
        ("personalize", folder, "--data", client, "--out", tmp_path / "m"),
    ):
        said = pefll(*arguments)
        assert said.code == 2
        *notes, error = said.err.splitlines()
        assert error.startswith("error: no checkpoint in ")
        assert error.endswith("is whole; start the run anew")
        assert all("damaged" in note for note in notes)
    shutil.rmtree(folder / "checkpoints")
    assert "has no checkpoint yet" in refused("evaluate", folder)
    (folder / "config.toml").write_text("rouns = 3")
    assert "unknown setting" in refused("evaluate", folder)


def test_a_full_disk_at_the_end_is_a_sentence(refused, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", lambda handle: full(None, None))
    sentence = refused("train", *DIGITS, "--out", tmp_path / "r")
    assert "No space left on device" in sentence


def test_a_full_gpu_is_a_sentence(refused, monkeypatch, tmp_path):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 lines\nof\ntext")

    monkeypatch.setattr(cli.fitting, "fit_together", full)
    assert "the GPU's memory is full" in refused("train", *DIGITS, "--out", tmp_path / "r")


def test_ctrl_c_before_there_is_anything_to_save(pefll, monkeypatch, tmp_path):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load", interrupted)
    said = pefll("evaluate", tmp_path)
    assert (said.code, said.err) == (130, "stopped before there was anything to save\n")


def test_ctrl_c_while_libraries_are_loaded():
    stop = """
import builtins
import pefll_command
real = builtins.__import__
def load(name, *rest):
    if name == "pefll.cli":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = load
pefll_command.main()
"""
    ended = subprocess.run([sys.executable, "-c", stop], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "stopped before anything was begun\n")
