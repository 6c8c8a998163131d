"""The two apps that Flower loads by name: `pefll.deploy.apps:server` and `pefll.deploy.apps:client`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from flwr.serverapp import ServerApp

from pefll.deploy import server_app
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.client.member import Member
from pefll.engines.flower.client.policy import Refusal
from pefll.engines.flower.protocol.message import BadMessage
from pefll.engines.flower.protocol.names import DELIVER
from pefll.engines.serial import SerialEngine
from pefll.models.neighbours import NeighbourModel
from pefll.models.spec import ModelSpec
from pefll.runs.personal import PersonalModel


def write_model(member: Member, header: dict[str, Any], trees: list[Any]) -> dict[str, Any]:
    """Write the personal model, which the server sent, to this client's disk; the reply is empty.

    Args:
        member: this client.
        header: not used.
        trees: a list with one element, the parameters θ [D].
    """
    del header
    if member.model is None:
        raise Refusal(
            "was not told where to write a model; it is started with --model FILE for that", code="PEFLL-P011"
        )
    method, agreed = member.method(), member.agreement
    (theta,) = trees
    if tuple(theta.shape) != (method.problem.model.size,):
        raise BadMessage(f"sent a model of shape {list(theta.shape)}")
    make = getattr(method, "personal_module", None)
    if make is None:
        module = method.problem.model.with_parameters(theta)
    else:  # some models need the client's own samples in addition to weights
        alone = dataclasses.replace(member.federation(), num_seen=0)
        engine = SerialEngine(alone, method, agreed.seed, 0, agreed.dtype)
        try:
            ((_, cohort),) = engine.cohorts(np.zeros(1, dtype=np.int64))
            with torch.no_grad():
                module = make(cohort, theta[None])
        finally:
            engine.close()
    spec = ModelSpec(
        model=agreed.model,
        input_shape=agreed.input_shape,
        classes=agreed.classes,
        normalise=agreed.normalise,
        tokens=agreed.tokens,
        class_names=agreed.class_names,
        feature_names=agreed.feature_names,
        table=agreed.table,
        num_clients=agreed.num_clients,
        dataset=agreed.dataset,
        task=agreed.learns or None,
        outputs=None if method.problem.task.outputs == agreed.classes else method.problem.task.outputs,
        label_columns=agreed.label_columns or None,
        neighbours=module.settings if isinstance(module, NeighbourModel) else None,
    )
    member.model.parent.mkdir(parents=True, exist_ok=True)
    PersonalModel(module.eval(), spec, method.problem.task).save(member.model, overwrite=True)
    return {}


server = ServerApp()
server.main()(server_app.main)
client = PefllClientApp({DELIVER: write_model})
