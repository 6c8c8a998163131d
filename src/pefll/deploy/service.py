"""The server and a client in the foreground, as a user starts them; Ctrl-C ends them and what they started."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pefll.deploy.admission import check_key_known
from pefll.deploy.certificates import expiry
from pefll.deploy.endings import Shown, check_port, ended_by_itself
from pefll.deploy.folder import find_bundle, server_address
from pefll.deploy.plan import read_app
from pefll.deploy.processes import (
    check_server,
    client_command,
    end_group,
    environment,
    program,
    register,
    resident_command,
    server_command,
    wait_for_server,
)
from pefll.deploy.signals import ended_by_signals
from pefll.deploy.watchdog import mark
from pefll.errors import PefllError
from pefll.progress import say
from pefll.wording import counted

AGAIN_SECONDS = 10


def serve(folder: Path, host: str | None, console: Console) -> None:
    """Run a federation's server until it is ended."""
    plan = read_app(folder)
    address = server_address(folder)
    until = expiry(folder / "server" / "server.crt")
    if until < datetime.now(UTC):
        raise PefllError(
            f"the server's certificate ended on {until:%Y-%m-%d}; make a new one: pefll flower renew {folder}"
        )
    home = folder / ".flower"
    home.mkdir(exist_ok=True)
    its_host, _, port = address.rpartition(":")
    advice = f"end that one, or give the federation another port: pefll flower renew {folder} --address HOST:PORT"
    check_port(host or its_host, int(port), advice)
    command = server_command(folder, host or its_host, int(port), home / "superlink.db")
    with ended_by_signals(), ExitStack() as stack:
        process = _start(stack, command, home, "server")
        check = partial(process.check, "Flower's server", f"{host or its_host}:{port}", advice)
        here = f"127.0.0.1:{port}" if host == "0.0.0.0" else address
        try:
            wait_for_server(here, time.monotonic() + 60, check)
            keys = sorted((folder / "keys").glob("*.pub"))
            new = register(keys, here, folder / "server" / "ca.crt")
        except PefllError:
            check()  # whoever answered in its place was no server of ours
            raise
        say(console, f"{address}: {counted(len(keys), 'client')} may come in, of which {len(new):,} new")
        say(
            console,
            f"Next, once they are there: flwr run {folder} deployment --stream ({counted(plan.rounds, 'round')})",
        )
        while True:
            check()
            time.sleep(0.2)


def take_part(
    folder: Path,
    name: str | None,
    data: Path,
    label: str,
    model: Path | None,
    counts: bool,
    console: Console,
    limits: dict[str, Any] | None = None,
) -> None:
    """Run a client until it is ended.

    Args:
        folder: the client's own, or the federation's.
        name: of the client; needed for the federation's folder.
        data: its samples.
        label: a table's column of labels.
        model: where its personal model goes; None for its folder.
        counts: whether the server may know how many samples there are.
        console: is told what happens.
        limits: fields of the client's `Policy` that differ from its client.toml.
    """
    bundle = find_bundle(folder, name)
    policy = replace(bundle.policy, **(limits or {}))
    if not data.expanduser().exists():
        raise PefllError(f"there is no file or folder {data}")
    check_server(bundle.address, bundle.folder / "ca.crt")
    check_key = partial(
        check_key_known, bundle.address, bundle.folder / "ca.crt", bundle.folder / "node.key", bundle.name
    )
    check_key()
    home = bundle.folder / ".flower"
    home.mkdir(exist_ok=True)
    sockets = Path(tempfile.mkdtemp(prefix="pefll-"))  # its owner's alone
    resident = sockets / "socket"
    config: dict[str, str | bool] = {
        "name": bundle.name,
        "data": str(data.expanduser().resolve()),
        "label": label,
        "state": str((bundle.folder / "state").resolve()),
        "model": str((model or bundle.folder / "model.safetensors").resolve()),
        "tells-counts": counts,
        **policy.to_node(),
        "resident": str(resident),
    }
    with ended_by_signals(), ExitStack() as stack:
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        staying = _start(stack, resident_command(resident), home, "resident")
        say(console, f"{bundle.name} takes part with {data}, at {bundle.address}; Ctrl-C ends it")
        say(console, policy.sentence)
        while True:
            with ExitStack() as once:
                # A command of its own each time: another program may have taken the local port meanwhile.
                node = _start(once, client_command(bundle.folder, bundle.address, config), home, "supernode")
                while node.poll() is None:
                    if staying.poll() is not None:
                        staying = _start(stack, resident_command(resident), home, "resident")
                    time.sleep(0.2)
            # The server takes a client that was killed for connected until a heartbeat is missed, about a minute long,
            # and refuses its successor until then.
            reason = ended_by_itself("the SuperNode", node.said(), node.log)
            check_key()
            say(console, f"{reason}; it is started again in {AGAIN_SECONDS} s")
            time.sleep(AGAIN_SECONDS)


def start_app(folder: Path, connection: str, overrides: dict[str, str]) -> int:
    """Start a federation's app, show what it says, and return its exit status."""
    read_app(folder)
    words = " ".join(f'{key}="{value}"' for key, value in overrides.items())
    command = [program("flwr"), "run", str(folder.resolve()), connection, "--stream", "--run-config", words]
    with ended_by_signals() as signals, ExitStack() as stack:
        process = subprocess.Popen(command, env=environment() | mark(), start_new_session=True)
        stack.callback(end_group, process)
        return process.wait()
    return 128 + signals[0]


def _start(stack: ExitStack, command: Sequence[str], home: Path, name: str) -> Shown:
    """Start a process in a group of its own, which ends with the stack."""
    process = Shown(command, environment(home.resolve()) | mark(), home / f"{name}.log")
    stack.callback(end_group, process)
    return process
