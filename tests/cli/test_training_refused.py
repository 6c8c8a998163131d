"""`pefll train`: one sentence for everything that cannot be trained or resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pefll.core import files
from pefll.runs import checkpoint
from pefll.runs.checksums import new_run
from pefll.runs.config import Config
from tests.cli.conftest import DIGITS


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--seeds", "0,0"], r"--seeds .*'0,0'.*PEFLL-C012"),
        (["--seeds", "0;1"], r"'0;1'.*PEFLL-C012"),
        (["--seeds", ""], r"''.*PEFLL-C012"),
        (["--seeds", "0,-1"], r"'0,-1'.*PEFLL-C012"),
        (["--seeds", "0,1", "--seed", "3"], "PEFLL-C015"),
    ],
)
def test_seeds_that_are_none(refused, tmp_path, arguments, part):
    refused("train", *DIGITS, *arguments, "--out", tmp_path / "r", match=part)
    assert not (tmp_path / "r").exists()


def test_folders_that_hold_seeds_already(pefll, refused, labelled, tmp_path):
    assert pefll("train", *DIGITS, "--seeds", "0,1", "--out", tmp_path / "r").code == 0
    for more in (["--seeds", "0,1"], ["--seeds", "5"], ["--seed", "5"]):
        assert "PEFLL-C018" in refused("train", *DIGITS, *more, "--out", tmp_path / "r")
    assert "PEFLL-C018" in refused("train", *DIGITS, "--seeds", "0,1", "--out", labelled)
    assert "PEFLL-C015" in refused("train", "--resume", tmp_path / "r", "--seeds", "0,1")
    assert "PEFLL-R118" in refused("evaluate", tmp_path / "r")
    refused("train", "--resume", tmp_path / "r", "--seed", "7", match=r"--seed 0\b.*\b7\b.*PEFLL-R104")


def test_a_folder_without_rounds_is_no_obstacle(pefll, tmp_path):
    Config(method="pefll", data_sha256="a").save(tmp_path / "config.toml", new_run())
    assert pefll("train", *DIGITS, "--out", tmp_path).code == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--method", "pefl"], r"method 'pefl'.*'pefll'.*PEFLL-A101"),
        (["--data", "digit"], r"data set 'digit'.*'digits'.*PEFLL-A101"),
        (["--data", "./none.npz"], r"\bnone\.npz\b.*PEFLL-D178"),
        (["--model", "lenett"], r"model 'lenett'.*'lenet'.*PEFLL-A101"),
        (["--model", "lenet"], r"\b8x8\b.*\b5x5\b.*PEFLL-N019"),
        (["--model", "lstm"], r"\(1, 8, 8\).*PEFLL-N005"),
        (["--model", "nowhere:f"], r"model 'nowhere:f'.*PEFLL-A106"),
        (["--model", "tests.models.zoo:too_wide"], r"\(12,\).*\b10 classes\b.*PEFLL-N009"),
        (["--nope"], "No such option"),
        (["--engine", "flower"], "PEFLL-T114"),
        (["--rounds", "many"], "--rounds"),
        (["--rounds", "-1"], r"--rounds .*-1\b.*PEFLL-A002"),
        (["--eval-every", "0"], r"--eval-every .*\b0\b.*PEFLL-A002"),
        (["--unseen", "1.5"], r"--unseen .*\b1\.5\b.*PEFLL-A007"),
        (["--set", "server_rl=1"], r"'server_rl'.*'server_lr'.*PEFLL-A101"),
        (["--set", "server_lr"], r"--set .*'server_lr'.*PEFLL-C011"),
        (["--set", "=3"], "PEFLL-C011"),
        (["--set", "server_lr=fast"], r"\bserver_lr\b.*'fast'.*PEFLL-A014"),
        (["--set", "local_steps=2.5"], r"\blocal_steps\b.*'2\.5'.*PEFLL-A014"),
        (["--set", "local_steps=0"], "PEFLL-S009"),
        (["--set", "embedding=cnvnet"], r"'cnvnet'.*PEFLL-A101"),
        (["--set", "hypernetwork=XL"], r"'XL'.*PEFLL-A101"),
        (["--method", "local", "--set", "batch_size=0"], "PEFLL-S008"),
        (["--partition", "by-classes 2"], r"'by-classes 2'.*PEFLL-D207"),
        (["--partition", "natural"], "PEFLL-D190"),
        (["--clients-per-round", "9"], r"clients_per_round .*\b9\b.*\b7 seen clients\b.*PEFLL-E008"),
        (["--engine", "vectr"], r"engine 'vectr'.*'vector'.*PEFLL-A101"),
        (["--precision", "half"], r"precision 'half'.*PEFLL-A101"),
        (["--device", "tpu"], r"\btpu\b.*PEFLL-T110"),
        (["--device", "meta"], "PEFLL-T111"),
    ],
)
def test_arguments_that_are_wrong(refused, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    base = [word for word in DIGITS if not (arguments[0] == "--method" and word in ("--set", "local_steps=2"))]
    refused("train", *base, *arguments, "--out", "r", match=part)
    assert not Path("r").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_where_there_is_none(refused, tmp_path, device):
    refused("train", *DIGITS, "--device", device, "--out", tmp_path / "r", match=r"--device cpu\b.*PEFLL-T112")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--seed", "9"], r"--seed 0\b.*\b9\b.*PEFLL-R104"),
        (["--set", "client_lr=1"], r"\bsettings\b.*'client_lr': 1\.0.*PEFLL-R104"),
        (["--method", "fedavg"], r"--method pefll\b.*PEFLL-R104"),
        (["--clients", "9"], r"--clients 8\b.*PEFLL-R104"),
        (["--eval-every", "3"], r"--eval-every 2\b.*\b3\b.*PEFLL-R104"),
        (["--rounds", "2"], r"--out \[PEFLL-R105\]"),
        (["--out", "elsewhere"], "PEFLL-C016"),
        (["--set", "nothing=1"], r"'nothing'.*PEFLL-A101"),
    ],
)
def test_resuming_as_something_else(refused, labelled, arguments, part):
    before = checkpoint.latest(labelled / "checkpoints", pytest.fail)
    config = (labelled / "config.toml").read_bytes()
    refused("train", "--resume", labelled, *arguments, match=part)
    assert (labelled / "config.toml").read_bytes() == config
    assert checkpoint.latest(labelled / "checkpoints", pytest.fail).round == before.round


def test_folders_that_are_no_place_for_a_run(refused, labelled, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert "PEFLL-T109" in refused("train", *DIGITS, "--out", tmp_path / name)
    assert "PEFLL-C018" in refused("train", *DIGITS, "--out", labelled)
    assert "PEFLL-R120" in refused("train", "--resume", tmp_path / "full")
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "a").read_text() == "mine"


def test_a_full_disk_at_the_end_is_a_sentence(refused, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", lambda handle: full(None, None))
    refused("train", *DIGITS, "--out", tmp_path / "r", match=r"No space left on device.*PEFLL-A102")


@pytest.mark.parametrize("engine", ["vector", "auto"])
def test_processes_of_the_vector_engine(refused, tmp_path, engine):
    sentence = refused(
        "train", *DIGITS, "--engine", engine, "--processes", 2, "--device", "cpu", "--out", tmp_path / "r"
    )
    assert "PEFLL-T125" in sentence
    assert "--engine serial" in sentence
    assert not (tmp_path / "r").exists()
