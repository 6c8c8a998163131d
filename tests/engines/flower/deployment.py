"""A federation of real processes for tests; everything that is started is ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pefll.deploy.folder import make_federation
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import Plan, write_app
from pefll.deploy.processes import free_port
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.terms import Terms
from tests.engines.flower.federations import NO_LIMITS, PER_ROUND, Setting

REPOSITORY = Path(__file__).parents[3]
APPS = {"server": "tests.engines.flower.apps:server", "client": "tests.engines.flower.apps:client"}
PATIENT = Terms(exchange_seconds=120, round_seconds=900, pause_seconds=1, patience_seconds=600)


def deploy(here: Setting, place: Path, apps: dict[str, str] | None = None, **changes: Any) -> Loopback:
    """Return the processes of a federation, none of them started yet."""
    names = tuple(client_name(number) for number in range(here.agreement.num_clients))
    settings = {"rounds": 2, "clients_per_round": PER_ROUND, "eval_every": 2, "terms": PATIENT} | changes
    folder = place / "fed"
    plan = make_federation(folder, Plan(here.agreement, names, **settings), f"127.0.0.1:{free_port()}")
    if apps:
        write_app(folder, "fed", plan, **apps)
    paths = {str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # an empty one would be the current folder
    there = Loopback(place / "logs", place / "home", folder=folder)
    there.client_app = (apps or {}).get("client", there.client_app)
    return there


def start(there: Loopback, here: Setting, troubles: dict[int, str] | None = None, clients: Any = None) -> None:
    """Start the server and clients, some of which misbehave."""
    there.start_server()
    for client in range(here.agreement.num_clients) if clients is None else clients:
        start_client(there, here, client, (troubles or {}).get(client, ""))


def start_client(there: Loopback, here: Setting, client: int, trouble: str = "") -> None:
    name = client_name(client)
    more = NO_LIMITS | ({"trouble": trouble} if trouble else {})
    there.start_client(name, here.folder / f"{name}.npz", here.folder / f"{name}.safetensors", **more)


def result(there: Loopback) -> dict[str, Any]:
    """Return what the test's server app wrote."""
    path = there.folder / "result.json"
    assert path.exists(), there.log("run")[-3000:] + there.log("server")[-1500:]
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found
