"""The two apps that Flower loads by name: `pefll.deploy.apps:server` and `pefll.deploy.apps:client`."""

from __future__ import annotations

from typing import Any

from flwr.serverapp import ServerApp

from pefll.deploy import server_app
from pefll.deploy.model_delivery import write_model
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.protocol.names import DELIVER

server = ServerApp()
client = PefllClientApp({DELIVER: write_model})


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Any, context: Any) -> None:
    """Run the task of the run config."""
    server_app.main(grid, context)
