"""Flower's own simulation, where Ray is there."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")
pytest.importorskip("ray", reason="Flower's simulation needs Ray: pip install 'flwr[simulation]==1.41.0'")

from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from benchmarks.flower_exchanges import BACKEND
from benchmarks.flower_node import SimulatedNode
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.flower.server.terms import Terms
from tests.engines.flower.federations import CLIENTS, PER_ROUND, serial_state, setting, sha256


def test_a_simulation_ends_with_the_same_bits_as_the_serial_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    here = setting(tmp_path)
    names = [client_name(number) for number in range(CLIENTS)]
    config = here.agreement.to_config() | {"simulation-data": str(tmp_path)}
    found: list[str] = []
    app = ServerApp()

    @app.main()
    def main(grid, context):
        del context
        engine = FlowerEngine(grid, here.agreement, names, PER_ROUND, Terms(exchange_seconds=100), print)
        engine.roster.wait_for(CLIENTS, 200)
        found.append(sha256(engine.advance(engine.start(), 0, 3)))
        engine.close()

    run_simulation(app, SimulatedNode(config), CLIENTS, backend_config=BACKEND)
    assert found == [sha256(serial_state(here))]
