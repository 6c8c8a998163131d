"""A whole federation on one machine: server and clients as processes of their own, with TLS and keys."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pefll.core.errors import PefllError
from pefll.deploy.connections import check_port
from pefll.deploy.folder import find_bundle, server_address
from pefll.deploy.plan import CLIENT_APP
from pefll.deploy.process_output import exit_error
from pefll.deploy.processes import Processes, client_command, run_command, server_command, wait_for_server


@dataclass
class Loopback(Processes):
    """The processes of a federation whose server is this machine.

    Attributes:
        folder: of the federation.
        keep_state: whether the server remembers nodes and runs when it is started again.
        client_app: what answers clients' messages, module:name.
        client_code: methods and models that the server may name to clients; see `client_command`.
    """

    folder: Path = Path()
    keep_state: bool = True
    client_app: str = CLIENT_APP
    client_code: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Of the server."""
        return server_address(self.folder)

    def start_server(self, seconds: float = 60.0) -> None:
        """Start the SuperLink, which lets all clients in whose keys are there."""
        host, _, port = self.address.rpartition(":")
        database = self.home / "superlink.db" if self.keep_state else None
        check_port(host, int(port), self.folder)
        self.start("server", server_command(self.folder, host, int(port), database))
        wait_for_server(self.address, time.monotonic() + seconds, partial(self.check, "server"))

    def check(self, *names: str) -> None:
        """Raise PefllError, with the last words of its log, where one of some processes has ended by itself."""
        for name in names:
            if self.running[name].poll() is not None:
                raise exit_error(f"Flower's process {name}", self.log(name), self.logs / f"{name}.log")

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
        server = through or self.address
        self.start(name, client_command(bundle.folder, server, config, self.client_app, self.client_code))

    def kill_client(self, name: str) -> None:
        """Kill all of a client at once, as a machine that loses its power would."""
        self.end(name, hard=True)

    def start_run(self, name: str = "run", **overrides: str | int | float) -> subprocess.Popen[bytes]:
        """Start the app, as `pefll flower run FOLDER` does; the process ends when the run does."""
        words = [
            f'{key.replace("_", "-")}="{v}"' if isinstance(v, str) else f"{key.replace('_', '-')}={v}"
            for key, v in overrides.items()
        ]
        return self.start(name, run_command(self.folder, words))

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
