"""Loggers: what trackio and Weights & Biases are given (stand-ins, and the real packages if they are installed)."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
        with pytest.raises(PefllError, match=rf"pip install {name} \[PEFLL-T551\]"):
            loggers_of(name)
    with pytest.raises(PefllError, match=r"'tensorbord'.*'tensorboard'.*PEFLL-A101"):
        loggers_of("tensorbord")
    assert loggers_of("") == loggers_of(" , ") == []
    assert sorted(LOGGERS) == ["tensorboard", "trackio", "wandb"]
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    assert [type(one) for one in loggers_of("wandb, wandb")] == [pefll.WandB]


def logged_by_wandb(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the figures of each step in the offline files of Weights & Biases in a run's folder."""
    import wandb
    from wandb.proto import wandb_internal_pb2 as protocol

    wandb.teardown()  # waits for its process, which writes the files
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        raw, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(raw):
            if (left := 32768 - at % 32768) < 7:  # the rest of a block is empty
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
            record = (record if kind in (3, 4) else b"") + raw[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # the whole record, or its end
                found = protocol.Record()
                found.ParseFromString(record)
                if found.WhichOneof("record_type") == "history":
                    items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in found.history.item}
                    yield items["_step"], items


def logged_by_trackio(folder: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the figures of each step of a run in trackio's database."""
    with sqlite3.connect(folder / "mine.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name like ?", [f"{name}%"])
        yield from ((step, json.loads(metrics)) for step, metrics in rows)


@pytest.mark.parametrize("name", KINDS)
def test_the_real_package_keeps_the_figures_of_runs_at_once_and_resumed_ones(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when trackio is imported
    for module in [one for one in sys.modules if one.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'pefll[{name}]' runs this test")
    for rounds in (4, 6):
        settings = QUICK | {"rounds": rounds, "out": tmp_path / "runs"}
        runs = pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], callbacks=[KINDS[name]("mine")], **settings)
        time.sleep(1)  # the names of files of Weights & Biases have whole seconds
    for seed, run in enumerate(runs):
        kept = (
            logged_by_wandb(tmp_path / "runs" / f"seed-{seed}")
            if name == "wandb"
            else logged_by_trackio(tmp_path, f"fedavg seed {seed} ")
        )
        found = {step: figures for step, figures in kept if "validation/seen/loss" in figures}
        for group in ("seen", "unseen"):
            for measure in pefll.Accuracy._fields:
                wanted = {row["round"]: row[group][measure] for row in run.history}
                assert {step: figures[f"validation/{group}/{measure}"] for step, figures in found.items()} == wanted
