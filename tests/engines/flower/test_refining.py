"""Steps on the device by real clients: the same models and scores as with the serial engine, and nothing is sent."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.data.samples import TEST
from pefll.deploy.apps import write_model
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.inprocess import InProcessGrid
from pefll.engines.flower.protocol.message import header_of, tensors_of
from pefll.engines.flower.protocol.names import DELIVER, KEPT
from pefll.engines.serial import SerialEngine
from pefll.runs.personal import PersonalModel
from pefll.training.evaluation import client_scores
from tests.engines.flower.federations import PER_ROUND, SEED, flower_state, serial_state, setting

STEPS = {"refine_steps": 3, "refine_lr": 0.1}
everybody = np.arange(6)


@pytest.mark.parametrize("method", ["pefll", "pefll-plus"])
def test_scores_and_model_files_are_those_of_refined_models(method, tmp_path):
    here = setting(tmp_path, method, seen=5, changes=STEPS)
    nodes = {node: context.node_config for node, context in here.grid.contexts.items()}
    here.grid = InProcessGrid(PefllClientApp({DELIVER: write_model}), nodes, here.agreement.to_config())
    state, _ = flower_state(here)
    asked, kept, replies = set(), {}, []

    def transport(node, request, deliver):
        header, reply = header_of(request.content), deliver(request)
        task = getattr(engine.method, header["task"], None)
        asked.add(header["task"])
        if task is not None:
            names = list(signature(task).parameters)[1:]
            used = {name for name, (kind, _) in zip(names, header["places"], strict=False) if kind == KEPT}
            kept.setdefault(header["task"], set()).update(used)
        if header["task"] == "refine":
            replies.append(tensors_of(reply.content))
        return [reply]

    here.grid.transport = transport
    engine = here.engine(newcomers=["client-005"])
    found = client_scores(engine, engine.method, state, everybody, TEST)
    assert asked - {"hello"} == {"describe_all", "refine", "predict"}
    assert {task: names for task, names in kept.items() if names} == {"predict": {"theta"}}
    assert len(replies) == 6
    assert not any(replies), "a client sends nothing of its refined model"
    serial = SerialEngine(here.federation, here.agreement.build(), SEED, PER_ROUND)
    trained = serial_state(here)
    np.testing.assert_array_equal(found, client_scores(serial, serial.method, trained, everybody, TEST))
    models = {}
    for ids, cohort in serial.cohorts(everybody):
        models |= dict(zip(ids.tolist(), serial.method.personalize(trained, cohort), strict=True))
    for _, cohort in engine.cohorts(everybody):
        assert not engine.deliver(cohort, engine.method.personalize(state, cohort))
    for client, theta in models.items():
        network = PersonalModel.load(tmp_path / f"client-{client:03}.safetensors").network
        weights = [weight.detach().numpy().ravel() for weight in network.parameters()]
        np.testing.assert_array_equal(np.concatenate(weights), theta.numpy())
    serial.close()
    engine.close()
