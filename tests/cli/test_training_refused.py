"""`pefll train`: one sentence for everything that cannot be trained or resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pefll.core import files
from pefll.runs import checkpoint
from tests.cli.conftest import DIGITS


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
        (["--seeds", "0,1", "--seed", "3"], "PEFLL-C015"),
    ],
)
def test_seeds_that_are_none(refused, tmp_path, arguments, part):
    assert part in refused("train", *DIGITS, *arguments, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_folders_that_hold_seeds_already(pefll, refused, labelled, tmp_path):
    assert pefll("train", *DIGITS, "--seeds", "0,1", "--out", tmp_path / "r").code == 0
    for more in (["--seeds", "0,1"], ["--seeds", "5"], ["--seed", "5"]):
        assert "PEFLL-C018" in refused("train", *DIGITS, *more, "--out", tmp_path / "r")
    assert "PEFLL-C018" in refused("train", *DIGITS, "--seeds", "0,1", "--out", labelled)
    assert "PEFLL-C015" in refused("train", "--resume", tmp_path / "r", "--seeds", "0,1")
    assert "PEFLL-R118" in refused("evaluate", tmp_path / "r")
    assert "cannot be resumed with 7" in refused("train", "--resume", tmp_path / "r", "--seed", "7")


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
        (["--engine", "flower"], "PEFLL-T114"),
        (["--rounds", "many"], "--rounds"),
        (["--rounds", "-1"], "--rounds is -1; it cannot be negative"),
        (["--eval-every", "0"], "--eval-every is 0; it must be at least 1"),
        (["--unseen", "1.5"], "--unseen is 1.5"),
        (["--set", "server_rl=1"], "unknown hyper-parameter of pefll 'server_rl': did you mean 'server_lr'?"),
        (["--set", "server_lr"], "--set takes NAME=VALUE, not 'server_lr'"),
        (["--set", "=3"], "PEFLL-C011"),
        (["--set", "server_lr=fast"], "pefll: server_lr must be a finite number, 0 or more, not 'fast'"),
        (["--set", "local_steps=2.5"], "local_steps must be a whole number"),
        (["--set", "local_steps=0"], "PEFLL-S009"),
        (["--set", "embedding=cnvnet"], "unknown embedding network 'cnvnet'"),
        (["--set", "hypernetwork=XL"], "unknown hypernetwork size 'XL'"),
        (["--method", "local", "--set", "batch_size=0"], "PEFLL-S008"),
        (["--partition", "by-classes 2"], "unknown partition 'by-classes 2'"),
        (["--partition", "natural"], "PEFLL-D190"),
        (["--clients-per-round", "9"], "clients_per_round is 9, but the federation has only 7 seen clients; lower it"),
        (["--engine", "vectr"], "unknown engine 'vectr': did you mean 'vector'?"),
        (["--precision", "half"], "unknown precision 'half'"),
        (["--device", "tpu"], "tpu"),
        (["--device", "meta"], "PEFLL-T111"),
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
    assert sentence.endswith("use --device cpu [PEFLL-T112]")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--seed", "9"], "started with --seed 0, and cannot be resumed with 9"),
        (["--set", "client_lr=1"], "started with settings"),
        (["--method", "fedavg"], "started with --method pefll"),
        (["--clients", "9"], "started with --clients 8"),
        (["--eval-every", "3"], "started with --eval-every 2, and cannot be resumed with 3"),
        (["--rounds", "2"], "extended but not shortened: start a new run in another folder, with --out"),
        (["--out", "elsewhere"], "PEFLL-C016"),
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
        assert "PEFLL-T109" in refused("train", *DIGITS, "--out", tmp_path / name)
    assert "PEFLL-C018" in refused("train", *DIGITS, "--out", labelled)
    assert "PEFLL-R120" in refused("train", "--resume", tmp_path / "full")
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "a").read_text() == "mine"


def test_a_full_disk_at_the_end_is_a_sentence(refused, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", lambda handle: full(None, None))
    sentence = refused("train", *DIGITS, "--out", tmp_path / "r")
    assert "No space left on device" in sentence


@pytest.mark.parametrize("engine", ["vector", "auto"])
def test_processes_of_the_vector_engine(refused, tmp_path, engine):
    sentence = refused(
        "train", *DIGITS, "--engine", engine, "--processes", 2, "--device", "cpu", "--out", tmp_path / "r"
    )
    assert "PEFLL-T125" in sentence
    assert "--engine serial" in sentence
    assert not (tmp_path / "r").exists()
