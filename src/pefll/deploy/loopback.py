"""A complete federation on this machine: the server and each client are processes, with TLS and keys."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from pefll.core.errors import PefllError
from pefll.deploy.connections import check_port
from pefll.deploy.folder import find_bundle, server_address
from pefll.deploy.plan import CLIENT_APP
from pefll.deploy.private import PRIVATE_UMASK, make_private_folder, private_opener
from pefll.deploy.process_output import exit_error
from pefll.deploy.processes import (
    client_command,
    end_groups,
    environment,
    run_command,
    server_command,
    wait_for_server,
)
from pefll.deploy.watchdog import watchdog_environment


@dataclass
class Loopback:
    """The processes of a federation on this machine; the end of the `with` block ends them.

    Each process has its own process group, so its children end with it.

    Attributes:
        logs: folder of output files, one for each process.
        home: Flower's home folder; see `environment`.
        folder: folder of the federation; needed only for its server, clients and runs.
        keep_state: whether a restarted server remembers nodes and runs.
        client_app: the app that answers messages, module:name.
        client_code: methods and models that the server may name; see `client_command`.
        running: processes by name.
    """

    logs: Path
    home: Path
    folder: Path = Path()
    keep_state: bool = True
    client_app: str = CLIENT_APP
    client_code: tuple[str, ...] = ()
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        make_private_folder(self.logs)
        make_private_folder(self.home)
        return self

    def __exit__(self, *error: Any) -> None:
        self.end(*list(self.running))

    @property
    def address(self) -> str:
        """Address of the server, host:port."""
        return server_address(self.folder)

    def start_server(self, seconds: float = 60.0) -> None:
        """Start the SuperLink and wait until it listens."""
        host, _, port = self.address.rpartition(":")
        database = self.home / "superlink.db" if self.keep_state else None
        check_port(host, int(port), self.folder)
        self.start("server", server_command(self.folder, host, int(port), database))
        wait_for_server(self.address, time.monotonic() + seconds, partial(self.check, "server"))

    def start_client(
        self, name: str, data: Path, model: Path | None = None, through: str = "", **more: str | bool
    ) -> None:
        """Start a client's SuperNode.

        Args:
            name: name of the client.
            data: file or folder with the client's samples.
            model: file for the personal model.
            through: address of a proxy to use instead of the server's address.
            more: further entries of the node config.
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

    def start_run(self, name: str = "run", **overrides: str | int | float) -> subprocess.Popen[bytes]:
        """Start the app as `pefll flower run FOLDER` does; the returned process ends with the run."""
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
        """Start the app, wait for its end, and return its output.

        Args:
            seconds: time limit.
            name: name of the process and of its log.
            watched: names of processes that must keep running; PefllError if one ends.
            look: function that is called several times a second.
            overrides: settings that replace those of the run config.
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

    def start(self, name: str, command: Sequence[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process and append its output to its log."""
        with open(self.logs / f"{name}.log", "ab", opener=private_opener) as log:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.home) | watchdog_environment() | (more or {}),
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )
        self.running[name] = process
        return process

    def check(self, *names: str) -> None:
        """If a named process has ended, raise PefllError with the last error of its log."""
        for name in names:
            if self.running[name].poll() is not None:
                raise exit_error(f"Flower's process {name}", self.log(name), self.logs / f"{name}.log")

    def end(self, *names: str, hard: bool = False) -> None:
        """End the named processes and their children; see `end_groups`."""
        end_groups(*(self.running.pop(name) for name in names if name in self.running), hard=hard)

    def log(self, name: str) -> str:
        """Return the output of a process."""
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
