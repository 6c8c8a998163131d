"""Flower's processes: started with everything off that would reach out of the machine, and always ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pefll.core.errors import PefllError
from pefll.deploy.plan import CLIENT_APP, CONNECTION
from pefll.deploy.private import PRIVATE_UMASK, make_private_folder, private_opener
from pefll.deploy.watchdog import watchdog_environment
from pefll.engines.flower.surroundings import check_surroundings

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
# Flower by default asks for two objects of a message at a time, each over a connection of its own. A message of ours is
# one object that matters, so that the second connection would be a TLS handshake and nothing else. These are defaults:
# who has a slow line and a model of many pieces may set others.
_ONE_AT_A_TIME = {"FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": "1", "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": "1"}
# A client computes with one thread, and it must find this package however this process found it.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_HOME = "FLWR_HOME"
# Without the folder that a user happens to be in: a file in it must not stand in for a module.
_MODULE = (sys.executable, "-P", "-m")


def environment(home: Path | None = None) -> dict[str, str]:
    """Return the environment for a process of Flower's; PefllError where this one has what Flower cannot read.

    Args:
        home: where Flower keeps its apps and settings; None for the user's own place.
    """
    check_surroundings()
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH", "")]))
    more = {_HOME: str(home)} if home is not None else {}
    return {**_ONE_AT_A_TIME, **os.environ, **QUIET, **_ONE_THREAD, "PATH": path, "PYTHONPATH": found, **more}


def program(name: str) -> str:
    """Return the path of one of Flower's programs; PefllError where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401")
    return found


def free_port() -> int:
    """Return a port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(folder: Path, host: str, port: int, database: Path | None) -> list[str]:
    """Return the command that starts the SuperLink with TLS, node authentication and a port for the operator."""
    command = [*_MODULE, "pefll.deploy.superlink", str(folder.resolve()), "--host", host, "--port", str(port)]
    return command + (["--database", str(database.resolve())] if database else [])


def client_command(
    bundle: Path, address: str, node_config: dict[str, str | bool], app: str = CLIENT_APP, code: Sequence[str] = ()
) -> list[str]:
    """Write the settings of a client's process into a file of its own, and return the command that starts it.

    Everybody on a machine can read the argument lists of its processes. This one names the file and nothing else.

    Args:
        bundle: has ca.crt and node.key.
        address: of the server, host:port.
        node_config: what the client's own app is told: its name, its data.
        app: answers messages, module:name; whatever app the server sends, it is this one that runs.
        code: methods and models beside pefll's own that the server may name, package.module:Name.
    """
    from pefll.deploy.node import NodeSettings

    place = bundle.resolve()
    own = (str(place / "ca.crt"), str(place / "node.key"))
    NodeSettings(address, *own, node_config, app, tuple(code)).write(place / "node.json")
    return [*_MODULE, "pefll.deploy.node", str(place / "node.json")]


def run_command(folder: Path, words: Sequence[str] = ()) -> list[str]:
    """Return Flower's command that starts a federation's app; it needs the environment of the server's home.

    Args:
        folder: of the federation.
        words: settings to override, each NAME=VALUE as in TOML.
    """
    command = [program("flwr"), "run", str(folder.resolve()), CONNECTION, "--stream"]
    return command + (["--run-config", " ".join(words)] if words else [])


def wait_for_server(address: str, ends: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until somebody listens at an address; PefllError where nobody does in time.

    Args:
        address: host:port.
        ends: until when, by the monotonic clock.
        check: raises PefllError where the server has ended meanwhile.
    """
    host, _, port = address.rpartition(":")
    while True:
        check()
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > ends:
                raise PefllError(
                    f"there is no server at {address}: {error}; start `pefll flower server`", code="PEFLL-F417"
                ) from None
            time.sleep(0.1)


@dataclass
class Processes:
    """Processes that end when the block does, however it ends.

    Each has a group of its own, so that what it starts ends with it.

    Attributes:
        logs: where the output of each goes, one file a process.
        home: Flower's own place; see `environment`.
        running: by name.
    """

    logs: Path
    home: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        make_private_folder(self.logs)
        make_private_folder(self.home)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(*list(self.running))

    def start(self, name: str, command: Sequence[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process; its output is appended to a file of its own."""
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

    def end(self, *names: str, hard: bool = False) -> None:
        """End processes and what they started; those that do not end are killed.

        Args:
            names: which.
            hard: kill at once, as a machine that loses its power would.
        """
        ending = [self.running.pop(name) for name in names if name in self.running]
        for process in ending:
            _signal(process, signal.SIGKILL if hard else signal.SIGTERM)
        ends = time.monotonic() + 5
        for process in ending:
            _kill_after(process, max(0.1, ends - time.monotonic()))

    def revive(self, *names: str) -> None:
        """Start those of some processes again that have ended by themselves."""
        for name in names:
            process = self.running.get(name)
            if process is not None and process.poll() is not None:
                self.end(name)
                self.start(name, process.args)  # type: ignore[arg-type]

    def log(self, name: str) -> str:
        """Return what a process has said."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def end_group(process: subprocess.Popen[bytes], seconds: float = 5.0) -> None:
    """End a process that leads a group of its own, and all that it started; kill what does not end."""
    _signal(process, signal.SIGTERM)  # once: at a second one Flower's node ends without telling the server
    _kill_after(process, seconds)


def _kill_after(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _signal(process, signal.SIGKILL)  # also for what it has left behind
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
