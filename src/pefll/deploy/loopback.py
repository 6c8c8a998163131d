"""A whole federation on one machine: server and clients as processes of their own, with TLS and keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pefll.deploy.folder import find_bundle, server_address
from pefll.deploy.plan import CONNECTION
from pefll.deploy.processes import (
    Processes,
    client_command,
    environment,
    program,
    register,
    resident_command,
    server_command,
    wait_for_server,
    write_connection,
)
from pefll.errors import PefllError


@dataclass
class Loopback(Processes):
    """The processes of a federation whose server is this machine.

    Attributes:
        folder: of the federation.
        keep_state: whether the server remembers nodes and runs when it is started again.
        sockets: of the clients' resident processes.
    """

    folder: Path = Path()
    keep_state: bool = True
    sockets: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pefll-")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        shutil.rmtree(self.sockets, ignore_errors=True)

    @property
    def address(self) -> str:
        """Of the server."""
        return server_address(self.folder)

    def start_server(self, seconds: float = 60.0) -> None:
        """Start the SuperLink and let all clients in whose keys are there."""
        host, _, port = self.address.rpartition(":")
        database = self.home / "superlink.db" if self.keep_state else None
        self.start("server", server_command(self.folder, host, int(port), database))
        wait_for_server(self.address, time.monotonic() + seconds)
        self.let_in()

    def let_in(self) -> list[str]:
        """Tell the server the keys of clients; return those that were new to it."""
        return register(sorted((self.folder / "keys").glob("*.pub")), self.address, self.folder / "server" / "ca.crt")

    def start_client(
        self, name: str, data: Path, model: Path | None = None, through: str = "", **more: str | bool
    ) -> None:
        """Start a client's SuperNode.

        Args:
            name: of the client.
            data: its samples.
            model: where its personal model goes.
            through: an address in place of the server's: of something between the two.
            more: further node config.
        """
        bundle = find_bundle(self.folder, name)
        config: dict[str, str | bool] = {
            "name": name,
            "data": str(data.resolve()),
            "state": str((bundle.folder / "state").resolve()),
            **({"model": str(model.resolve())} if model else {}),
            **bundle.policy.to_node(),
            **more,
        }
        resident = self.sockets / name
        self.start(f"{name}-resident", resident_command(resident))
        self.start(name, client_command(bundle.folder, through or self.address, {**config, "resident": str(resident)}))

    def kill_client(self, name: str) -> None:
        """Kill all of a client at once, as a machine that loses its power would."""
        self.end(name, f"{name}-resident", hard=True)

    def start_run(self, name: str = "run", **overrides: str | int | float) -> subprocess.Popen[bytes]:
        """Start the app, as `flwr run FOLDER deployment --stream` does; the process ends when the run does."""
        self._connect()
        words = [
            f'{key.replace("_", "-")}="{v}"' if isinstance(v, str) else f"{key.replace('_', '-')}={v}"
            for key, v in overrides.items()
        ]
        command = [program("flwr"), "run", str(self.folder.resolve()), CONNECTION, "--stream"]
        return self.start(name, command + (["--run-config", " ".join(words)] if words else []))

    def run(self, seconds: float, name: str = "run", **overrides: str | int | float) -> str:
        """Do as `start_run` and wait for the end; return what the app said."""
        process = self.start_run(name, **overrides)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise PefllError(f"the run did not end within {seconds:.0f} s: {self.log(name)[-2000:]}") from None
        finally:
            self.end(name)
        return self.log(name)

    def _connect(self) -> None:
        """Write the server's address into the settings of this federation's own Flower home."""
        before = os.environ.get("FLWR_HOME")
        os.environ["FLWR_HOME"] = environment(self.home)["FLWR_HOME"]
        try:
            write_connection(CONNECTION, self.address, self.folder / "server" / "ca.crt")
        finally:
            if before is None:
                del os.environ["FLWR_HOME"]
            else:
                os.environ["FLWR_HOME"] = before
