"""A whole federation on one machine: server and clients as processes of their own, with TLS and keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from pefll.deploy.endings import check_port, ended_by_itself
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

PORT_ADVICE = "end that one, or begin again with another port"


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
        check_port(host, int(port), PORT_ADVICE)
        self.start("server", server_command(self.folder, host, int(port), database))
        try:
            wait_for_server(self.address, time.monotonic() + seconds, partial(self.check, "server"))
            self.let_in()
        except PefllError:
            self.check("server")  # whoever answered in its place was no server of ours
            raise

    def check(self, *names: str) -> None:
        """Raise PefllError, with the last words of its log, where one of some processes has ended by itself."""
        for name in names:
            if self.running[name].poll() is not None:
                log = self.logs / f"{name}.log"
                address = self.address if name == "server" else ""
                raise ended_by_itself(f"Flower's process {name}", self.log(name), log, address, PORT_ADVICE)

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
        resident = self.start_resident(name)
        self.start(name, client_command(bundle.folder, through or self.address, {**config, "resident": str(resident)}))

    def start_resident(self, name: str) -> Path:
        """Start the process that answers a client's messages, unless it runs already; return its socket."""
        place = self.sockets / name
        process = self.running.get(f"{name}-resident")
        if process is None or process.poll() is not None:
            self.start(f"{name}-resident", resident_command(place))
        return place

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

    def run(
        self,
        seconds: float,
        name: str = "run",
        watched: Sequence[str] = (),
        look: Callable[[], None] = lambda: None,
        **overrides: str | int | float,
    ) -> str:
        """Do as `start_run` and wait for the end; return what the app said.

        Args:
            seconds: how long to wait.
            name: of the process and its log.
            watched: processes that must go on meanwhile; PefllError where one ends by itself.
            look: is called now and then.
            overrides: of the run config.
        """
        process = self.start_run(name, **overrides)
        ends = time.monotonic() + seconds
        try:
            while process.poll() is None:
                if time.monotonic() > ends:
                    raise PefllError(
                        f"the run did not end within {seconds:.0f} s: {self.log(name)[-2000:]}", code="PEFLL-F105"
                    )
                self.check(*watched)
                look()
                time.sleep(0.2)
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
