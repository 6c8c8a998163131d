"""Loggers: what trackio and Weights & Biases are given (stand-ins here), and what happens if they fail."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.training.loggers import LOGGERS, loggers_of
from tests.federations import flat, ragged

QUICK = {"rounds": 4, "eval_every": 2, "clients_per_round": 2, "local_steps": 1, "processes": 1, "device": "cpu"}
KINDS = {"trackio": pefll.Trackio, "wandb": pefll.WandB}


class Tracked:
    """A run of a tracker."""

    def __init__(self, given: dict, fails: int) -> None:
        self.given, self.fails, self.logged, self.finished = given, fails, [], False

    def log(self, figures, step):
        if step >= self.fails:
            raise OSError("no space left")
        self.logged.append((step, figures))

    def finish(self):
        self.finished = True


@pytest.fixture(params=KINDS)
def tracker(request, monkeypatch):
    """A stand-in for a tracker's package: its runs, and the round from which it fails."""
    module = ModuleType(request.param)
    module.runs, module.fails = [], 99
    module.init = lambda **given: module.runs.append(Tracked(given, module.fails)) or module.runs[-1]
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_a_tracker_is_given_settings_and_figures(tracker, tmp_path):
    kind = KINDS[tracker.__name__]
    runs = pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], out=tmp_path, callbacks=[kind("mine")], **QUICK)
    assert len(tracker.runs) == 2
    for seed, (tracked, run) in enumerate(zip(tracker.runs, runs, strict=True)):
        assert [step for step, _ in tracked.logged] == [2, 4]
        assert tracked.logged[-1][1]["validation/seen/loss"] == run.history[-1]["seen"]["loss"]
        assert tracked.given["project"] == "mine"
        assert tracked.given["name"].startswith(f"fedavg seed {seed} ")
        assert (tracked.given["config"]["seed"], tracked.given["config"]["settings/local_steps"]) == (seed, 1)
        assert tracked.given["resume"] == "allow"
        assert tracked.finished
        if tracker.__name__ == "wandb":
            assert (tracked.given["mode"], tracked.given["dir"]) == ("offline", str(tmp_path / f"seed-{seed}"))
    pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], out=tmp_path, callbacks=[kind("mine")], **QUICK | {"rounds": 6})
    assert [one.given["name"] for one in tracker.runs[2:]] == [one.given["name"] for one in tracker.runs[:2]]


def test_a_logger_that_fails_later_does_not_end_the_run(tracker):
    tracker.fails = 4
    with pytest.warns(UserWarning, match=r"stopped after round 4, and the run goes on: OSError: no space left"):
        run = pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK | {"rounds": 6})
    assert [step for step, _ in tracker.runs[0].logged] == [2]
    assert torch.equal(flat(run.final), flat(pefll.fit(ragged(), "fedavg", **QUICK | {"rounds": 6}).final))


def test_a_logger_that_cannot_begin_is_a_sentence(tracker):
    def refuse(**given):
        raise ValueError("no such project")

    tracker.init = refuse
    with pytest.raises(PefllError, match=r"failed in on_start: .*no such project.*PEFLL-T550"):
        pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK)


def test_names_of_loggers(monkeypatch):
    for name in ("trackio", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(PefllError, match=rf"pip install 'pefll\[{name}\]' \[PEFLL-T551\]"):
            loggers_of(name)
    with pytest.raises(PefllError, match=r"'tensorbord'.*'tensorboard'.*PEFLL-A101"):
        loggers_of("tensorbord")
    assert loggers_of("") == loggers_of(" , ") == []
    assert sorted(LOGGERS) == ["tensorboard", "trackio", "wandb"]
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    assert [type(one) for one in loggers_of("wandb, wandb")] == [pefll.WandB]
