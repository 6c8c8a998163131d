"""Schedules and samplings with real messages: the server decides, and clients have the bits of the serial engine."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import pefll
from pefll.core.errors import PefllError
from pefll.core.schedules import step
from pefll.deploy import server_app
from pefll.deploy.plan import Plan
from pefll.engines.flower.client.app import task_factor
from pefll.engines.flower.protocol.message import BadMessage
from pefll.engines.round_plan import RoundPlan, by_samples
from pefll.engines.serial import SerialEngine
from pefll.runs.record import RunFolder
from tests.deploy.test_server_app import plan_of
from tests.engines.flower.federations import PER_ROUND, SEED, flower_state, setting, sha256


@pytest.mark.parametrize("method", ["fedavg", "pefll"])
def test_rounds_have_the_bits_of_the_serial_engine(tmp_path, method):
    plan = RoundPlan(step(1, 1 / 3), step(1, 0.7) if method == "pefll" else None, by_samples)
    here = setting(tmp_path, method)
    engine = SerialEngine(here.federation, here.agreement.build(), SEED, PER_ROUND, plan=plan)
    ready = here.engine(plan=plan)
    ready.roster.present()  # now the server knows how many samples the clients have
    found = ready.advance(ready.start(), 0, 3)
    wanted = engine.advance(engine.start(), 0, 3)
    engine.close(), ready.close()
    assert sha256(found) == sha256(wanted)
    assert sha256(found) != sha256(flower_state(setting(tmp_path, method), rounds=3)[0])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedprox", {"lr_schedule": "cosine 0.1", "sampling": "samples"}),
        ("pefll", {"lr_schedule": "step 1 0.5", "server_lr_schedule": "cosine"}),
    ],
)
def test_a_deployed_run_has_the_bits_of_a_simulation(tmp_path, method, settings):
    here = setting(tmp_path, method, changes={"mu": 0.7} if method == "fedprox" else None)
    deployed = server_app.train(here.grid, plan_of(here, tmp_path, rounds=3, **settings))
    common = {"rounds": 3, "clients_per_round": PER_ROUND, "eval_every": 1, "seed": SEED, "model": "mlp"}
    common |= here.agreement.settings | {"engine": "serial", "processes": 1, "device": "cpu"}
    simulated = pefll.fit(here.federation, method, **common, **settings)
    assert sha256(deployed.final) == sha256(simulated.final)
    assert sha256(deployed.final) != sha256(pefll.fit(here.federation, method, **common).final)


def test_a_federations_settings_name_them(tmp_path):
    here = setting(tmp_path, "fedavg")
    plan = plan_of(here, tmp_path, lr_schedule="step 1 0.5", sampling="samples")
    assert Plan.from_config(plan.to_config()) == plan
    older = {name: value for name, value in plan.to_config().items() if name not in ("sampling", "lr-schedule")}
    assert Plan.from_config(older).lr_schedule == "constant"  # made by an earlier version
    trained = server_app.train(here.grid, plan)
    assert (trained.config.lr_schedule, trained.config.sampling) == ("step 1 0.5", "samples")
    assert len(RunFolder(tmp_path / "run").history()) == 2
    with pytest.raises(PefllError, match="PEFLL-S550"):
        server_app.round_plan(plan_of(here, tmp_path, server_lr_schedule="cosine"))


def test_a_client_checks_the_factor():
    assert task_factor({}) is None
    assert task_factor({"lr_factor": 0.5}) == 0.5
    for bad in (math.nan, math.inf, -0.1, "1", True, [1.0]):
        with pytest.raises(BadMessage, match="factor"):
            task_factor({"lr_factor": bad})
