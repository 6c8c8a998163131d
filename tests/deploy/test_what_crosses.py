"""A recording of all messages of a run: η_v, v, θ, Δθ, Δv, Δη_v and counts cross, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.deploy import server_app
from pefll.engines.flower.protocol.message import FORMAT, RECORD, header_of, tensors_of
from tests.deploy.test_server_app import fresh_grid, last_state, plan_of
from tests.engines.flower.federations import CLIENTS, setting

HEADER = {"task", "round", "exchange", "cache", "client", "agreement"}
REQUEST = HEADER | {"static", "trees", "places", "keep"}
REPLY = HEADER | {"name"}
PARTS = ("average.hypernetwork", "hypernetwork")


@pytest.fixture
def recording(tmp_path):
    """Train, evaluate, test and personalise with PeFLL, and keep a copy of every message."""
    here = setting(tmp_path, changes={"server_average": 0.9})
    messages = []

    def transport(node, request, deliver):
        reply = deliver(request)
        messages.append((request.metadata.message_type, request.content, reply.content))
        return [reply]

    here.grid.transport = transport
    server_app.train(here.grid, plan_of(here, tmp_path))
    here.grid = fresh_grid(here)
    here.grid.transport = transport
    server_app.personalize(here.grid, plan_of(here, tmp_path))
    return here, messages


def everything(content) -> bytes:
    """Return all bytes of a message: numbers and texts."""
    assert set(content) == {RECORD}
    record = dict(content[RECORD])
    assert record.pop("format") == FORMAT
    return b"".join(value.encode() if isinstance(value, str) else value for value in record.values())


def test_only_these_cross(recording):
    here, messages = recording
    method = here.agreement.build()
    eta_v, v, theta = (method.phi.size,), (method.descriptor,), (method.problem.model.size,)
    number = ()
    allowed = {
        "query.hello": ([], []),
        "train.describe": ([eta_v], [v]),
        "train.adapt": ([theta], [theta]),
        "train.describe_backward": ([v], [eta_v]),  # η_v itself is known to the client
        "query.describe_all": ([eta_v], [v]),
        "evaluate.predict": ([theta], [number] * 4),
        "query.deliver": ([theta], []),
    }
    assert {kind for kind, *_ in messages} == set(allowed)
    for kind, request, reply in messages:
        for content, shapes in zip((request, reply), allowed[kind], strict=True):
            assert sorted(tuple(leaf.shape) for leaf in tensors_of(content).values()) == sorted(shapes), kind
        assert set(header_of(request)) == (HEADER if kind == "query.hello" else REQUEST)
        assert set(header_of(reply)) == (REPLY | {"counts"} if kind == "query.hello" else REPLY)


def test_no_sample_no_label_and_no_weight_of_the_hypernetwork_crosses(recording, tmp_path):
    here, messages = recording
    contents = [everything(content) for _, *pair in messages for content in pair]
    for sample in here.federation.x:
        pixels = sample.numpy().tobytes()
        assert not any(pixels in content for content in contents)
    state = last_state(tmp_path)
    parts = [name for name in state if name.endswith("hypernetwork")]
    assert sorted(parts) == [f"{which}.{part}" for which in ("best", "server") for part in PARTS]
    for part in parts:
        weights = state[part].numpy().tobytes()
        for start in range(0, len(weights) - 32, 32):
            piece = weights[start : start + 32]
            if len(set(piece)) > 8:  # zeros are everywhere
                assert not any(piece in content for content in contents)


def test_a_client_that_tells_no_counts_tells_none(tmp_path):
    here = setting(tmp_path)
    for context in here.grid.contexts.values():
        context.node_config["tells-counts"] = False
    told = []

    def transport(node, request, deliver):
        reply = deliver(request)
        told.append(header_of(reply.content).get("counts", "nothing"))
        return [reply]

    here.grid.transport = transport
    engine = here.engine()
    assert len(engine.roster.present()) == CLIENTS
    engine.close()
    assert told == [None] * CLIENTS
    assert (engine.federation.count[1:] == 0).all()
    assert torch.equal(engine.federation.count[0], torch.ones(CLIENTS, dtype=torch.int64))


def test_headers_are_small(recording):
    _, messages = recording
    longest = max(len(json.dumps(header_of(content))) for _, *pair in messages for content in pair)
    assert longest < 1000
