"""Flower's processes: started with everything off that would reach out of the machine, and always ended."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pefll.deploy.certificates import public_key_as_pem
from pefll.deploy.watchdog import mark
from pefll.engines.flower.surroundings import check_surroundings
from pefll.errors import PefllError
from pefll.wording import argument

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
_KNOWN_KEY = 412  # what the control interface answers to a key that it has


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
        raise PefllError("real clients need Flower: pip install 'pefll[flower]'")
    return found


def free_port() -> int:
    """Return a port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(folder: Path, host: str, port: int, database: Path | None) -> list[str]:
    """Return the command that starts the SuperLink with TLS and node authentication."""
    secrets = folder / "server"
    command = [
        program("flower-superlink"),
        *("--ssl-ca-certfile", str(secrets / "ca.crt")),
        *("--ssl-certfile", str(secrets / "server.crt")),
        *("--ssl-keyfile", str(secrets / "server.key")),
        *("--host", host),
        *("--port", str(port)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]
    return command + (["--database", str(database)] if database else [])


def client_command(bundle: Path, address: str, node_config: dict[str, str | bool]) -> list[str]:
    """Return the command that starts a SuperNode.

    Args:
        bundle: has ca.crt and node.key.
        address: of the server, host:port.
        node_config: what the client's own app is told: its name, its data.
    """
    words = []
    for key, value in node_config.items():
        text = str(value)
        if '"' in text or "'" in text or "\n" in text:
            raise PefllError(f"{text!r} has a quote in it, which Flower's --node-config does not take; rename it")
        words.append(f"{key}={str(value).lower()}" if isinstance(value, bool) else f'{key}="{text}"')
    return [
        program("flower-supernode"),
        *("--root-certificates", str(bundle / "ca.crt")),
        *("--auth-supernode-private-key", str(bundle / "node.key")),
        *("--superlink", address),
        *("--host", "127.0.0.1"),
        *("--port", str(free_port())),
        *("--node-config", " ".join(words)),
    ]


def resident_command(place: Path) -> list[str]:
    """Return the command that starts the process which answers a client's messages.

    Args:
        place: of its socket; the system takes about 100 characters, so it is in a temporary folder of its own.
    """
    return [sys.executable, "-m", "pefll.deploy.resident", str(place)]


def register(public_keys: Sequence[Path], address: str, authority: Path, seconds: float = 60.0) -> list[str]:
    """Let nodes in: tell the server their public keys.

    Args:
        public_keys: of the nodes; the name of a file is that of the node.
        address: of the server.
        authority: ca.crt.
        seconds: how long to wait for a server that is starting.

    Returns:
        The names of the nodes that were let in now; a node that was let in before is none of them.
    """
    connection = _connection("pefll", address, authority)
    ends = time.monotonic() + seconds
    wait_for_server(address, ends)
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import RegisterNodeRequest

    with redirect_stdout(io.StringIO()):  # it says which server, which whoever calls this knows
        control = init_http_client_from_connection(connection)
    done = []
    try:
        for path in public_keys:
            request = RegisterNodeRequest(public_key=public_key_as_pem(path), name=path.stem)
            try:
                control.RegisterNode(request=request)
            except Exception as error:  # Flower has several kinds of them
                if getattr(getattr(error, "response", None), "status_code", 0) == _KNOWN_KEY:
                    continue
                raise PefllError(f"the server did not take the key {path}: {error}") from error
            done.append(path.stem)
    finally:
        control.close()
    return done


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
                raise PefllError(f"there is no server at {address}: {error}; start `pefll flower server`") from None
            time.sleep(0.1)


def check_server(address: str, authority: Path) -> None:
    """Raise PefllError where the server at an address cannot be trusted, or is not there.

    Flower itself tries again and again without saying why.

    Args:
        address: host:port.
        authority: ca.crt of the federation.
    """
    host, _, port = address.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=str(authority))
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            trust.wrap_socket(plain, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        raise PefllError(f"the server at {address} is not this federation's: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise PefllError(f"the server at {address} does not speak TLS as it should: {error.reason}") from None
    except OSError as error:
        raise PefllError(f"there is no server at {address}: {error.strerror or error}") from None


def check_connection(name: str, authority: Path) -> Path:
    """Return the file of Flower's own settings; PefllError where the name is another server's in it."""
    from flwr.cli.flower_config import init_flwr_config, read_flower_config

    with redirect_stdout(io.StringIO()):
        init_flwr_config()
    content, path = read_flower_config()
    there = content.get("superlink", {}).get(name, {})
    authority_there = there.get("root-certificates", "")
    ours = authority_there == str(authority.resolve())
    if there and not ours and (not authority_there or Path(authority_there).exists()):
        raise PefllError(
            f"{path} has a connection {name!r} to another server; choose another name with {argument('connection')}"
        )
    return Path(path)


def write_connection(name: str, address: str, authority: Path) -> Path:
    """Write a server's address into Flower's own settings, for `flwr run APP NAME`; return the file."""
    from flwr.cli.flower_config import write_superlink_connection

    path = check_connection(name, authority)
    write_superlink_connection(_connection(name, address, authority))
    return path


def _connection(name: str, address: str, authority: Path) -> Any:
    from flwr.cli.typing import SuperLinkConnection

    return SuperLinkConnection(name=name, address=address, root_certificates=str(authority.resolve()))


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
        self.logs.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(*list(self.running))

    def start(self, name: str, command: Sequence[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process; its output is appended to a file of its own."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.home) | mark() | (more or {}),
                start_new_session=True,
            )
        self.running[name] = process
        return process

    def end(self, *names: str, hard: bool = False) -> None:
        """End processes and what they started; those that do not heed are killed.

        Args:
            names: which.
            hard: kill at once, as a machine that loses its power would.
        """
        ending = [self.running.pop(name) for name in names if name in self.running]
        for process in ending:
            _signal(process, signal.SIGKILL if hard else signal.SIGTERM)
        ends = time.monotonic() + 5
        for process in ending:
            end_group(process, max(0.1, ends - time.monotonic()))

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
    """End a process that leads a group of its own, and all that it started; kill what does not heed."""
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _signal(process, signal.SIGKILL)  # also for what it has left behind
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
