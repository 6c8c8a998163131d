"""Starts Flower's processes without telemetry or downloads, and ends them."""

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
from pathlib import Path

from pefll.core.errors import PefllError
from pefll.deploy.plan import CLIENT_APP, CONNECTION
from pefll.engines.flower.protocol.environment import check_environment

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
# By default Flower transfers two objects of a message at a time, each over its own connection. Our messages have one
# large object, so the second connection would only cost a TLS handshake. A user may set other values, for example for a
# slow line and a model of many arrays.
_ONE_AT_A_TIME = {"FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": "1", "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": "1"}
# A client computes with one thread.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_HOME = "FLWR_HOME"
# -P: a file in the current folder must not replace a module.
_MODULE = (sys.executable, "-P", "-m")


def environment(home: Path | None = None) -> dict[str, str]:
    """Return the environment for a Flower process; PefllError if Flower's settings in this environment are invalid.

    `home` is Flower's folder of apps and settings; None for the user's folder.
    """
    check_environment()
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH", "")]))
    more = {_HOME: str(home)} if home is not None else {}
    return {**_ONE_AT_A_TIME, **os.environ, **QUIET, **_ONE_THREAD, "PATH": path, "PYTHONPATH": found, **more}


def program(name: str) -> str:
    """Return the path of one of Flower's programs; PefllError if it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise PefllError("real clients need Flower: pip install flwr==1.41.0", code="PEFLL-F401")
    return found


def free_port() -> int:
    """Return a free port of this machine."""
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
    """Write the settings of a client's process to a file, and return the command that starts it.

    Everybody on a machine can read argument lists, so the command contains only the name of this file. `bundle` is the
    client's folder, with ca.crt and node.key. `NodeSettings` explains the other arguments.
    """
    from pefll.deploy.node import NodeSettings

    place = bundle.resolve()
    own = (str(place / "ca.crt"), str(place / "node.key"))
    NodeSettings(address, *own, node_config, app, tuple(code)).write(place / "node.json")
    return [*_MODULE, "pefll.deploy.node", str(place / "node.json")]


def run_command(folder: Path, words: Sequence[str] = ()) -> list[str]:
    """Return Flower's command that starts a federation's app; it needs `environment(home)` with the server's home.

    Each element of `words` overrides a setting: NAME=VALUE, as in TOML.
    """
    command = [program("flwr"), "run", str(folder.resolve()), CONNECTION, "--stream"]
    return command + (["--run-config", " ".join(words)] if words else [])


def wait_for_server(address: str, ends: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until a server listens at an address; PefllError if there is none at the deadline.

    Args:
        address: address of the server, host:port.
        ends: deadline, on the monotonic clock.
        check: function that raises PefllError if the server has ended meanwhile.
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


def end_groups(*leaders: subprocess.Popen[bytes], hard: bool = False) -> None:
    """End the process groups with these leaders; kill those that still run after 5 s, or at once if `hard`."""
    for process in leaders:  # one signal only: at a second one Flower's node exits without telling the server
        _signal(process, signal.SIGKILL if hard else signal.SIGTERM)
    ends = time.monotonic() + 5
    for process in leaders:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, ends - time.monotonic()))
        _signal(process, signal.SIGKILL)  # ends children that still run, too
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
