"""`pefll train`: what it trains, keeps, says and goes on with."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from torch import nn

from pefll.runs.record import RunFolder
from pefll.training.fitting import fit
from tests.cli.conftest import DIGITS, SMALL, features
from tests.federations import ragged


def test_train_says_what_came_out(pefll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pefll.core.progress.QUIET_SECONDS", 0.0)
    said = pefll("train", "--method", "fedavg", *DIGITS, "--seed", 5)
    assert said.code == 0
    assert "runs/digits-fedavg-5: best round" in said.out
    assert "Next: pefll show runs/digits-fedavg-5" in said.out
    assert "4/4" in said.err
    assert RunFolder(tmp_path / "runs/digits-fedavg-5").summary()["seed"] == 5


def test_events_for_tensorboard_are_written_where_somebody_asks(pefll, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    for name, option, events in (("a", [], 0), ("b", ["--tensorboard"], 1)):
        assert pefll("train", "--method", "fedavg", *DIGITS, *option, "--out", tmp_path / name).code == 0
        assert len([*(tmp_path / name).glob("events.out.tfevents.*")]) == events
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = pefll("train", "--method", "fedavg", *DIGITS, "--tensorboard", "--out", tmp_path / "c")
    assert (said.code, (tmp_path / "c").exists()) == (2, False)
    assert "pip install tensorboard" in said.err
    assert "[PEFLL-T130]" in said.err


def test_local_trains_nothing_together(pefll, tmp_path):
    said = pefll("train", "--method", "local", *DIGITS[:-2], "--set", "epochs=1", "--out", tmp_path / "l")
    assert said.code == 0
    assert RunFolder(tmp_path / "l").summary()["rounds"] == 0
    said = pefll("train", "--resume", tmp_path / "l")
    assert said.code == 0
    assert said.err.endswith(f"nothing is trained: its results are in {tmp_path}/l/summary.json.\n")


def test_a_finished_run_is_not_tested_again(pefll, tmp_path, monkeypatch):
    path = features(tmp_path / "mine.npz")
    first = pefll("train", "--data", path, *SMALL[2:], "--out", tmp_path / "r")
    summary = (tmp_path / "r" / "summary.json").read_bytes()
    path.unlink()  # which is not even read
    again = pefll("train", "--resume", tmp_path / "r")
    assert again == (
        0,
        first.out,
        f"{tmp_path}/r was finished already, so nothing is trained: its results are in {tmp_path}/r/summary.json; "
        "--rounds 8 would extend it.\n",
    )
    assert (tmp_path / "r" / "summary.json").read_bytes() == summary
    features(path)
    for state in tmp_path.glob("r/checkpoints/*/state.safetensors"):
        state.write_bytes(state.read_bytes()[:-1])
    said = pefll("train", "--resume", tmp_path / "r")
    assert said.code == 2
    assert "PEFLL-R007" in said.err, "what cannot be gone on with is not finished"
    assert (tmp_path / "r" / "summary.json").read_bytes() == summary, "but keeps its results"


@pytest.mark.parametrize("partition", ["by-class 2", "dirichlet 0.5", "dirichlet 0.3/2"])
def test_partitions_are_kept_in_the_config_and_resumed(pefll, tmp_path, partition):
    assert pefll("train", *DIGITS, "--partition", partition, "--out", tmp_path / "r").code == 0
    assert RunFolder(tmp_path / "r").summary()["partition"] == partition
    assert pefll("train", "--resume", tmp_path / "r", "--rounds", 6).code == 0
    assert RunFolder(tmp_path / "r").summary()["rounds"] == 6


def test_a_run_on_what_was_given_in_python_goes_on_there(pefll, refused, tmp_path):
    run = tmp_path / "run"
    fit(ragged(), "fedavg", model=nn.Sequential(nn.Linear(6, 3)), rounds=2, out=run)
    said = refused("train", "--resume", run, "--rounds", 4, match=rf"^error: {run} .*PEFLL-C019")
    assert f"pefll.fit(federation, ..., out={str(run)!r})" in said
    assert "was finished already" in pefll("train", "--resume", run).err


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
    assert "PEFLL-T120" in said.err


def test_a_model_by_import_path(pefll, tmp_path, client):
    out = tmp_path / "r"
    assert pefll("train", *DIGITS, "--model", "tests.models.zoo:tied", "--out", out).code == 0
    said = pefll("personalize", out, "--data", client, "--out", tmp_path / "m.safetensors")
    assert said.code == 0
    assert "--data more_samples.npz --model tests.models.zoo:tied" in said.out
    said = pefll("predict", tmp_path / "m.safetensors", "--data", client)
    assert said.code == 2  # a file does not choose which code is run
    assert "--model module:function" in said.err
    own = ("--model", "tests.models.zoo:tied")
    assert pefll("predict", tmp_path / "m.safetensors", "--data", client, *own).code == 0


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
    again = pefll("train", "--resume", together)
    assert f"are in {together}/seed-0/summary.json and {together}/seed-2/summary.json; --rounds 8 would" in again.err
    assert again.out == said.out.replace("runs/digits-pefll", str(together))
    assert pefll("train", "--resume", together, "--rounds", 6).code == 0
    assert [RunFolder(together / f"seed-{seed}").summary()["rounds"] for seed in (0, 2)] == [6, 6]
    said = pefll("results", "add", together, "--to", tmp_path / "results")
    assert said.out.count("wrote ") == 2
    said = pefll("results", "table", tmp_path / "results")
    assert said.out.count("| digits, 8 | pefll | 2 |") == 1
    assert pefll("results", "table", tmp_path / "results", "--method", "pefll").out == said.out
    said = pefll("results", "table", tmp_path / "results", "--method", "fedavg")
    assert said.code == 2
    assert re.search(r"\bfedavg\b.*PEFLL-C014", said.err)
    said = pefll("show", together)
    assert said.code == 0
    assert "seed-2" in said.out
    assert (together / "curves.png").is_file()
    assert pefll("train", *DIGITS, "--seeds", "7").code == 0
    assert RunFolder(tmp_path / "runs" / "digits-pefll-2" / "seed-7").summary()["lockstep"] == 1


def test_one_seed_that_fails_among_several(pefll, tmp_path, monkeypatch):
    from pefll.core.errors import PefllError
    from pefll.engines.vector import VectorEngine

    advance = VectorEngine.advance

    def instead(self, server, first, rounds):
        if self.seed == 1 and first == 2:
            raise PefllError("it diverged")
        return advance(self, server, first, rounds)

    monkeypatch.setattr(VectorEngine, "advance", instead)
    said = pefll("train", *DIGITS, "--engine", "vector", "--seeds", "0,1", "--out", tmp_path / "r")
    assert said.code == 2
    assert "seed 1 failed: it diverged" in said.err
    assert said.err.endswith("error: 1 of 2 runs failed: seed 1: it diverged [PEFLL-T126]\n")
    assert "Test accuracy" in said.out
    assert RunFolder(tmp_path / "r" / "seed-0").summary() is not None


def test_accuracies_that_nobody_can_measure(pefll, tmp_path):
    alone = features(tmp_path / "alone.npz", client=np.arange(96))
    said = pefll("train", "--data", alone, *SMALL[2:], "--out", tmp_path / "alone")
    assert "No client has a test sample" in said.out
    some = features(tmp_path / "some.npz", client=np.r_[0, 1, np.repeat(np.arange(2, 10), 12)[:94]])
    said = pefll("train", "--data", some, *SMALL[2:], "--out", tmp_path / "some")
    assert "9 seen and 1 unseen clients (2 without test samples), model" in said.err
    assert "\n2 of 10 clients have no test sample: accuracies are those of the others.\n" in said.out
    assert "2 of 10 clients have no test sample" in pefll("evaluate", tmp_path / "some").err
    assert "sample" not in pefll("evaluate", tmp_path / "some", "--split", "train").err
    few = features(tmp_path / "few.npz", clients=3)
    said = pefll("train", "--data", few, *SMALL[2:], "--out", tmp_path / "few", "--precision", "bf16")
    assert "--unseen" in said.out
    assert "float32 (only a GPU has bf16)" in said.err


def test_early_stopping_schedules_and_sampling_as_options(pefll, refused, tmp_path):
    options = ["train", "--method", "fedavg", *DIGITS, "--eval-every", 1, "--set", "client_lr=0"]  # it learns nothing
    said = pefll(*options, "--early-stopping", 2, "--out", tmp_path / "a")
    assert (said.code, RunFolder(tmp_path / "a").summary()["rounds"]) == (0, 3)
    assert "ended after round 3 of 4 by EarlyStopping" in said.err
    assert pefll(*options, "--early-stopping", 2, "--seeds", "0,1", "--out", tmp_path / "b").code == 0
    summaries = [RunFolder(tmp_path / "b" / f"seed-{seed}").summary() for seed in (0, 1)]
    assert [one["stopped"]["by"] for one in summaries] == ["EarlyStopping"] * 2
    # The run that stopped early is extended, and stops where a run of this length stops.
    assert pefll("train", "--resume", tmp_path / "a", "--rounds", 9, "--early-stopping", 5).code == 0
    assert RunFolder(tmp_path / "a").summary()["rounds"] == 6
    refused(*options, "--early-stopping", 0, match="PEFLL-A002")
    refused(*options, "--log", "wand", match="PEFLL-A101")
    refused(*options, "--lr-schedule", "step 1", match="--lr-schedule.*PEFLL-A550")
    refused(*options, "--sampling", "most", match="PEFLL-A101")


def test_a_run_with_functions_of_ones_own_goes_on_by_command(pefll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine_of_training.py").write_text(
        "def rate(t): return 1 / (t + 1)\n\ndef first(t, samples, size, rng): return range(size)\n"
    )
    own = ["--lr-schedule", "mine_of_training:rate", "--sampling", "mine_of_training:first"]
    said = pefll("train", "--method", "fedavg", *DIGITS, *own, "--checkpoint-minutes", 1, "--out", "r")
    assert said.code == 0
    config = RunFolder(tmp_path / "r").config_file.read_text()
    assert 'lr_schedule = "mine_of_training:rate"' in config
    assert "checkpoint_minutes = 1.0" in config
    assert pefll("train", "--resume", "r", "--rounds", 5, *own).code == 0
    assert RunFolder(tmp_path / "r").summary()["rounds"] == 5
