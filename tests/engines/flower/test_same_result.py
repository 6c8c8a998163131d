"""Real messages, and the same bits as the serial engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.core.tree import leaves
from pefll.data.samples import TEST
from pefll.engines.serial import SerialEngine
from pefll.methods import METHODS
from pefll.training.evaluation import client_scores
from tests.engines.flower.federations import PER_ROUND, SEED, flower_state, serial_state, setting, sha256
from tests.engines.test_engines import slow_beyond_the_paper

# Their clients keep a part of what a simulation has in the server's state.
KEEP = ("pfedme", "fedrep", "scaffold", "ditto", "apfl", "fedper", "lg-fedavg")
every_method = pytest.mark.parametrize("method", sorted(METHODS))


@every_method
def test_the_server_ends_with_the_same_bits_as_with_the_serial_engine(method, tmp_path):
    here = setting(tmp_path, method)
    serial, (state, _) = serial_state(here), flower_state(here)
    for expected, found in zip(leaves(serial), leaves(state), strict=True):
        if method in KEEP and expected.dim() == 2:
            assert not torch.equal(found, expected), "the server has what clients keep to themselves"
            found = torch.stack([here.kept(client, row) for client, row in enumerate(found)])
        assert torch.equal(found, expected)
    if method not in KEEP:
        assert sha256(state) == sha256(serial)


def test_pixels_and_convolutions_too(tmp_path):
    here = setting(tmp_path, shape=(1, 16, 16), model="lenet")
    assert sha256(flower_state(here)[0]) == sha256(serial_state(here))


def test_float64_too(tmp_path):
    from dataclasses import replace

    from pefll.engines.flower.client.app import PefllClientApp
    from pefll.engines.flower.inprocess import InProcessGrid

    here = setting(tmp_path)
    here.agreement = replace(here.agreement, precision="float64")
    nodes = {node: context.node_config for node, context in here.grid.contexts.items()}
    here.grid = InProcessGrid(PefllClientApp(), nodes, here.agreement.to_config())
    state, _ = flower_state(here)
    engine = SerialEngine(here.federation, here.agreement.build(), SEED, PER_ROUND, torch.float64)
    serial = engine.advance(engine.start(), 0, 3)
    engine.close()
    assert state.hypernetwork.dtype == torch.float64
    assert sha256(state) == sha256(serial)


@slow_beyond_the_paper("method")  # `real_clients_can_run_it` is the faster one
def test_scores_are_the_same_too(method, tmp_path):
    here = setting(tmp_path, method)
    state, _ = flower_state(here)
    engine = here.engine()
    everybody = np.arange(here.federation.num_clients)
    found = client_scores(engine, engine.method, state, everybody, TEST)
    engine.close()
    serial = SerialEngine(here.federation, here.agreement.build(), SEED, PER_ROUND)
    expected = client_scores(serial, serial.method, serial_state(here), everybody, TEST)
    serial.close()
    assert (found == expected).all()
    assert found[:, 0].sum() > 0


@pytest.mark.parametrize("method", ["pefll", "fedavg", "pfedhn"])
def test_the_door_counts_what_is_sent(method, tmp_path):
    here = setting(tmp_path, method)
    _, engine = flower_state(here)
    serial = SerialEngine(here.federation, here.agreement.build(), SEED, PER_ROUND)
    serial.advance(serial.start(), 0, 3)
    serial.close()
    assert engine.ledger == serial.ledger


def test_a_client_that_forgot_what_it_was_sent_is_sent_it_again(tmp_path):
    """As a node does that is restarted between two exchanges of a round."""
    here = setting(tmp_path)
    expected = sha256(serial_state(here))
    from flwr.app import RecordDict

    def transport(node, request, deliver):
        here.grid.contexts[node].state = RecordDict()
        return [deliver(request)]

    here.grid.transport = transport
    state, engine = flower_state(here)
    assert sha256(state) == expected
    assert not engine.dropped


def test_nothing_stays_in_the_process_of_a_client(tmp_path):
    """A ClientApp made anew for every message, as Flower does, gives the same result."""
    from pefll.engines.flower.client.app import PefllClientApp

    here = setting(tmp_path)
    here.grid._app = lambda message, context: PefllClientApp()(message, context)
    assert sha256(flower_state(here)[0]) == sha256(serial_state(here))
