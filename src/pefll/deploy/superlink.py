"""The server's process: Flower's SuperLink behind two ports, one for clients and one for the operator.

Flower's program `flower-superlink` has one port, and everybody who reaches it may command the server. This process runs
the same application behind two ports. Clients use the federation's address (`gateway.FleetGateway`). The operator uses
a free port of this machine (`gateway.OperatorGateway`).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from logging import INFO
from pathlib import Path
from typing import Any

import uvicorn
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.cli.flower_config import init_flwr_config, write_superlink_connection
from flwr.cli.typing import SuperLinkConnection
from flwr.common.constant import (
    ISOLATION_MODE_PROCESS,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    TRANSPORT_TYPE_GRPC_RERE,
    AuthnType,
)
from flwr.supercore import log
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.deploy.admission import Admission
from pefll.deploy.connections import (
    RESERVED_DESCRIPTORS,
    HandshakeTimeoutLoop,
    HeadTimeoutProtocol,
    LimitedListener,
    bind,
    raise_descriptor_limit,
)
from pefll.deploy.database import with_database
from pefll.deploy.gateway import MOST_HEAD_BYTES, FleetGateway, OperatorGateway
from pefll.deploy.ownership import Ownership
from pefll.deploy.plan import CONNECTION
from pefll.deploy.private import PRIVATE_UMASK
from pefll.deploy.server_app_process import AppStarter

LOOPBACK = "127.0.0.1"
# The server refuses more open connections than this. A client has one or two connections.
MOST_CONNECTIONS = 4096


class _Server(uvicorn.Server):  # type: ignore[misc]
    """A web server that handles no signals, because two servers run in this process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def serve(folder: Path, host: str, port: int, database: Path | None) -> None:
    """Run a federation's server for clients at host:port until a signal ends the process.

    `folder` contains server/ and keys/. `database` is the file of nodes and runs; None for a database in memory.
    """
    most = max(1, min(MOST_CONNECTIONS, raise_descriptor_limit() - RESERVED_DESCRIPTORS))
    public, own = LimitedListener(bind(host, port, folder), most), bind(LOOPBACK, 0, folder)
    token, authority = secrets.token_urlsafe(32), folder / "server" / "ca.crt"
    config = _config(folder, own.getsockname()[1], database, token)
    app = with_database(lambda: create_app(config, SuperLinkLifespan), database, _report)
    state = app.state.linkstate_factory.state()
    Ownership().guard(fleet_handlers)
    admission = Admission(folder / "keys", state, _report)
    change = admission.update()
    _report(f"{counted(admission.admitted, 'client')} may connect, of which {len(change.new):,} new")
    address = f"{LOOPBACK}:{config.port}"
    write_access(Path(os.environ["FLWR_HOME"]), address, authority, token)
    starter = AppStarter(state, address, authority, _report)
    try:
        with asyncio.Runner(loop_factory=HandshakeTimeoutLoop) as runner:
            runner.run(_serve_both(app, admission, token, config, (public, own), starter))
    finally:
        starter.close()


def write_access(home: Path, address: str, authority: Path, token: str) -> None:
    """Write the operator's address and secret for `flwr`, in place of those of an earlier server.

    `flwr` reads both in the folder `FLWR_HOME`, and sends the secret as the access token of an account. Only the owner
    of the federation can read this folder.

    Args:
        home: the federation's Flower home folder; `FLWR_HOME` of this process must be the same.
        address: address of the operator's port, host:port.
        authority: path of ca.crt.
        token: the secret.
    """
    with redirect_stdout(io.StringIO()):
        init_flwr_config()
    write_superlink_connection(
        SuperLinkConnection(name=CONNECTION, address=address, root_certificates=str(authority.resolve()))
    )
    place = home / "credentials.yaml"
    place.unlink(missing_ok=True)
    store = FileCredentialStore(place)  # writes atomically, with mode 0600
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())


class OperatorAccount(NoOpControlAuthnPlugin):  # type: ignore[misc]
    """Flower's check of accounts, with one account: the operator's. A request with the secret belongs to it.

    `gateway.OperatorGateway` has checked the secret before.
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def validate_tokens_in_metadata(self, metadata: Any) -> tuple[bool, AccountInfo | None]:
        """Return whether a request has the secret, and the operator's account if so."""
        given = [str(value) for _, value in metadata]
        if len(given) != 1 or not secrets.compare_digest(given[0].encode(), self._token.encode()):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)


async def _serve_both(
    app: Any,
    admission: Admission,
    token: str,
    config: SuperLinkLifespanConfig,
    sockets: tuple[socket.socket, socket.socket],
    starter: AppStarter,
) -> None:
    """Run the operator's port and the clients' port at the same time; the clients' port opens last."""
    settings: dict[str, Any] = {
        "log_config": get_uvicorn_log_config(console_handler.level),
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "server_header": False,
        "ws": "none",
        "proxy_headers": False,
        "timeout_graceful_shutdown": 5,
    }
    own = _Server(uvicorn.Config(OperatorGateway(app, token, starter.is_running), lifespan="on", **settings))
    public = _Server(
        uvicorn.Config(
            FleetGateway(app, admission),
            lifespan="off",
            http=HeadTimeoutProtocol,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            limit_concurrency=MOST_CONNECTIONS,
            **settings,
        )
    )

    def end() -> None:
        own.should_exit = public.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    serving = asyncio.create_task(own.serve([sockets[1]]))
    while not own.started and not serving.done():
        await asyncio.sleep(0.02)
    if not serving.done():
        starter.start()
        await public.serve([sockets[0]])
        own.should_exit = True
    await serving


def _config(folder: Path, port: int, database: Path | None, token: str) -> SuperLinkLifespanConfig:
    """Return Flower's settings: TLS, authentication of nodes, and a random secret, so that others get no tasks."""
    paths = [folder / "server" / name for name in ("ca.crt", "server.crt", "server.key")]
    authority, certificate, key = (path.read_bytes() for path in paths)
    return SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=LOOPBACK,
        port=port,
        insecure=False,
        certificates=(authority, certificate, key),
        superexec_auth_secret=secrets.token_bytes(32),
        authn_plugin=OperatorAccount(token),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(paths[0]),
        ssl_certfile=str(paths[1]),
        ssl_keyfile=str(paths[2]),
        database=str(database) if database else FLWR_IN_MEMORY_DB_NAME,
        isolation=ISOLATION_MODE_PROCESS,
        runtime_dependency_install=False,
    )


def _report(sentence: str) -> None:
    log(INFO, "%s", sentence)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database", type=Path)
    given = parser.parse_args()
    os.umask(PRIVATE_UMASK)
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(name, None)  # these settings open further ports, which no gateway protects
    try:
        serve(given.folder, given.host, given.port, given.database)
    except PefllError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
