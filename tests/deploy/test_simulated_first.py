"""A federation's first rounds on one machine, the others with real clients: one run, which says who did what."""

from __future__ import annotations

import io

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.files import read_json, write_json
from pefll.core.tree import named_leaves
from pefll.deploy import server_app
from pefll.deploy.plan import write_app
from pefll.deploy.simulation import simulate
from pefll.report.runs import read_run
from pefll.runs import checkpoint, manifest
from pefll.runs.record import RunFolder
from pefll.training import run
from tests.deploy.test_server_app import plan_of
from tests.engines.flower.federations import serial_state, setting


@pytest.mark.parametrize("method", ["pefll", "fedavg", "fedrep"])
def test_real_clients_go_on_with_a_simulation_bit_for_bit(method, tmp_path):
    here = setting(tmp_path, method)
    plan = plan_of(here, tmp_path, rounds=3)
    write_app(tmp_path, "fed", plan)
    simulated = simulate(tmp_path, tmp_path, 2)
    assert simulated.summary["engine"] == "serial"
    assert read_run(RunFolder(plan.run)).summary["rounds"] == 2, "`pefll show` reads it so"
    assert not RunFolder(plan.run).descriptors_file.exists()
    log = io.StringIO()
    trained = server_app.train(here.grid, plan, Console(file=log, width=1000))
    saved = checkpoint.latest(RunFolder(plan.run).checkpoints, print)
    for name, leaf in named_leaves(serial_state(here, rounds=3)):
        rows = saved.tensors[f"server.{name}"]
        if name == "heads":  # what clients keep now is on their own disks
            rows = torch.stack([here.kept(client, row) for client, row in enumerate(rows)])
        assert torch.equal(rows, leaf)
    assert trained.summary["engines"] == [
        {"engine": "serial", "after_round": 0},
        {"engine": "flower", "after_round": 2},
    ]
    assert [(row["round"], row["engine"]) for row in RunFolder(plan.run).history()] == [
        (1, "serial"),
        (2, "serial"),
        (3, "flower"),
    ]
    assert "the engine serial did the first 2 rounds; flower continues" in log.getvalue()
    assert run.load(plan.run).config.engine == "flower"
    with pytest.raises(PefllError) as refused:
        simulate(tmp_path, tmp_path, 2)
    assert refused.value.code == "PEFLL-F112"


def test_what_cannot_be_simulated_is_said_and_leaves_no_run(tmp_path):
    here = setting(tmp_path)
    write_app(tmp_path, "fed", plan_of(here, tmp_path, rounds=3))
    for rounds, data, code in (
        (3, tmp_path, "PEFLL-F110"),
        (0, tmp_path, "PEFLL-F110"),
        (2, here.folder / "x", "PEFLL-F111"),
    ):
        with pytest.raises(PefllError) as refused:
            simulate(tmp_path, data, rounds)
        assert refused.value.code == code
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("progress", [None, [], "x", {}, {"engines": 3}, {"engines": [["serial"]]}, {"engines": [3]}])
def test_a_checkpoint_with_hostile_progress_is_one_sentence(progress, tmp_path):
    here = setting(tmp_path)
    plan = plan_of(here, tmp_path, rounds=3)
    write_app(tmp_path, "fed", plan)
    simulate(tmp_path, tmp_path, 1)
    newest = manifest.newest_first(RunFolder(plan.run).checkpoints)[0]
    content = read_json(newest / manifest.MANIFEST)
    before = content["facts"]["progress"]
    content["facts"]["progress"] = before | progress if isinstance(progress, dict) and progress else progress
    write_json(newest / manifest.MANIFEST, manifest.write(content["round"], content["files"], content["facts"]))
    with pytest.raises(PefllError) as refused:
        simulate(tmp_path, tmp_path, 2)
    assert refused.value.code == "PEFLL-R021"
