"""Loggers: what trackio and Weights & Biases are given (stand-ins, and the real packages if they are installed)."""

from __future__ import annotations

import inspect
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
from tests.trackers import Tracker

QUICK = {"rounds": 4, "eval_every": 2, "clients_per_round": 2, "local_steps": 1, "processes": 1, "device": "cpu"}
KINDS = {"trackio": pefll.Trackio, "wandb": pefll.WandB}


@pytest.fixture(params=KINDS)
def tracker(request, monkeypatch):
    """A stand-in for a tracker's package."""
    module = Tracker(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_a_tracker_is_given_settings_and_figures(tracker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = KINDS[tracker.__name__]
    # Both runs train at once, and opening the second one must not end the first.
    runs = pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], out="runs", callbacks=[kind("mine")], **QUICK)
    assert len(tracker.store) == 2
    for seed, (kept, run) in enumerate(zip(tracker.store.values(), runs, strict=True)):
        assert list(kept.rows) == [2, 4]
        figures = {f"validation/seen/{name}": value for name, value in run.history[-1]["seen"].items()}
        assert {name: value for name, value in kept.rows[4].items() if "/seen/" in name} == figures
        (given,) = kept.given
        assert given["project"] == "mine"
        assert given["name"].startswith(f"fedavg seed {seed} ")
        assert (given["config"]["seed"], given["config"]["settings/local_steps"]) == (seed, 1)
        assert not any(isinstance(value, dict) for value in given["config"].values()), "a flat table"
        assert given["resume"] == "allow"
        assert kept.finished == 1
        if tracker.__name__ == "wandb":
            place = str(tmp_path / "runs" / f"seed-{seed}")
            assert (given["mode"], given["dir"], given["reinit"]) == ("offline", place, "create_new")


def test_a_resumed_run_goes_on_in_the_tracker(tracker, tmp_path):
    kind = KINDS[tracker.__name__]
    for rounds in (4, 8):
        settings = QUICK | {"rounds": rounds, "out": tmp_path}
        runs = pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], callbacks=[kind("mine")], **settings)
    assert len(tracker.store) == 2
    for kept, run in zip(tracker.store.values(), runs, strict=True):
        assert [given["name"] for given in kept.given] == [kept.given[0]["name"]] * 2
        assert kept.finished == 2
        wanted = {row["round"]: row["unseen"]["loss"] for row in run.history}
        assert list(wanted) == [2, 4, 6, 8]
        assert {step: figures["validation/unseen/loss"] for step, figures in kept.rows.items()} == wanted


def test_a_run_without_a_folder_is_a_run_of_its_own(tracker):
    for _ in range(2):
        pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK)
    assert [list(kept.rows) for kept in tracker.store.values()] == [[2, 4], [2, 4]]


@pytest.mark.parametrize("out", [False, True])
def test_a_logger_that_fails_later_does_not_end_the_run(tracker, tmp_path, out):
    tracker.fails = 4
    folder = {"out": tmp_path / "run"} if out else {}
    with pytest.warns(UserWarning, match=r"stopped after round 4, and the run goes on: OSError: no space left"):
        run = pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK | {"rounds": 6} | folder)
    (kept,) = tracker.store.values()
    assert list(kept.rows) == [2]
    assert torch.equal(flat(run.final), flat(pefll.fit(ragged(), "fedavg", **QUICK | {"rounds": 6}).final))
    if out:  # with space on the disk again, the resumed run goes on with the same run of the tracker
        tracker.fails = 99
        pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK | {"rounds": 8} | folder)
        (kept,) = tracker.store.values()
        assert list(kept.rows) == [2, 8]


def test_a_logger_that_cannot_finish_does_not_end_the_run(tracker):
    tracker.fails_to_finish = True
    with pytest.warns(UserWarning, match=r"stopped after round 4, and the run goes on: OSError: the server is gone"):
        run = pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK)
    assert run.summary["rounds"] == 4


def test_a_logger_that_cannot_begin_is_a_sentence(tracker):
    def refuse(**given):
        raise ValueError("no such project")

    tracker.init = refuse
    with pytest.raises(PefllError, match=r"failed in on_start: .*no such project.*PEFLL-T550"):
        pefll.fit(ragged(), "fedavg", callbacks=[KINDS[tracker.__name__]()], **QUICK)


@pytest.mark.parametrize("name", KINDS)
def test_a_stand_in_has_the_keywords_of_the_real_package(name):
    real = pytest.importorskip(name, reason=f"{name} is not installed: pip install 'pefll[{name}]' runs this test")
    given = set(inspect.signature(Tracker(name).init).parameters)
    assert given <= set(inspect.signature(real.init).parameters)


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
