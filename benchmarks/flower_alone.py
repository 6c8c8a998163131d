"""A federation on this machine that uses only Flower's own programs: SuperLink and SuperNodes, with TLS and keys.

Benchmarks compare `pefll flower server` and `pefll flower client` with it. Everybody who reaches its port can command
this server.
"""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

from flwr.cli.typing import SuperLinkConnection
from flwr.cli.utils import init_http_client_from_connection
from flwr.proto.control_pb2 import RegisterNodeRequest

from pefll.deploy.certificates import public_key_as_pem
from pefll.deploy.folder import find_bundle
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import CONNECTION
from pefll.deploy.processes import free_port, program, wait_for_server


def superlink_command(folder: Path, port: int, database: Path | None) -> list[str]:
    """Return the command that starts Flower's SuperLink with TLS and node authentication."""
    secrets = folder / "server"
    command = [
        program("flower-superlink"),
        *("--ssl-ca-certfile", str(secrets / "ca.crt")),
        *("--ssl-certfile", str(secrets / "server.crt")),
        *("--ssl-keyfile", str(secrets / "server.key")),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]
    return command + (["--database", str(database)] if database else [])


def register(public_keys: Iterable[Path], address: str, authority: Path) -> None:
    """Register nodes, each under the name of its key file."""
    connection = SuperLinkConnection(name="alone", address=address, root_certificates=str(authority.resolve()))
    with redirect_stdout(io.StringIO()):
        control = init_http_client_from_connection(connection)
    try:
        for path in public_keys:
            control.RegisterNode(RegisterNodeRequest(public_key=public_key_as_pem(path), name=path.stem))
    finally:
        control.close()


class FlowerAlone(Loopback):
    """The processes of a federation; all of them are Flower's own programs."""

    def start_server(self, seconds: float = 60.0) -> None:
        """Start the SuperLink, and register all clients whose keys are in the federation's folder."""
        port = int(self.address.rpartition(":")[2])
        self.start("server", superlink_command(self.folder, port, self.home / "superlink.db"))
        wait_for_server(self.address, time.monotonic() + seconds)
        register(sorted((self.folder / "keys").glob("*.pub")), self.address, self.folder / "server" / "ca.crt")

    def start_client(
        self, name: str, data: Path, model: Path | None = None, through: str = "", **more: str | bool
    ) -> None:
        """Start a SuperNode, which runs the app that the server sends."""
        del model
        bundle = find_bundle(self.folder, name)
        config = {"name": name, "data": str(data.resolve()), **bundle.policy.to_node(), **more}
        words = [f"{key}={str(v).lower()}" if isinstance(v, bool) else f'{key}="{v}"' for key, v in config.items()]
        command = [
            program("flower-supernode"),
            *("--root-certificates", str(bundle.folder / "ca.crt")),
            *("--auth-supernode-private-key", str(bundle.folder / "node.key")),
            *("--superlink", through or self.address),
            *("--host", "127.0.0.1"),
            *("--port", str(free_port())),
            *("--node-config", " ".join(words)),
        ]
        self.start(name, command)

    def start_run(self, name: str = "run", **overrides: str | int | float) -> subprocess.Popen[bytes]:
        """Start the app; the server's address is in the Flower home folder of this federation."""
        authority = (self.folder / "server" / "ca.crt").resolve()
        (self.home / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "{self.address}"\nroot-certificates = "{authority}"\n'
        )
        return super().start_run(name, **overrides)
