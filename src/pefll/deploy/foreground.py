"""Starts the server, a client or a run in the foreground; Ctrl-C ends it and all processes that it started."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.core.wording import counted
from pefll.deploy.certificates import expiry
from pefll.deploy.connections import check_port
from pefll.deploy.folder import find_bundle, server_address
from pefll.deploy.plan import read_app, renew_app
from pefll.deploy.private import make_private_folder, tighten
from pefll.deploy.process_output import ShownProcess, exit_error
from pefll.deploy.processes import (
    client_command,
    end_groups,
    environment,
    run_command,
    server_command,
    wait_for_server,
)
from pefll.deploy.server_check import check_key_known, check_server
from pefll.deploy.shutdown import exit_on_signals
from pefll.deploy.watchdog import watchdog_environment
from pefll.runs.record import RunFolder

AGAIN_SECONDS = 10


def serve(folder: Path, host: str | None, console: Console, port: int | None = None) -> None:
    """Run a federation's server until it is ended.

    Args:
        folder: folder of the federation.
        host: host at which to listen for clients; None for the host of the server's address.
        console: console for messages.
        port: port at which to listen, which may differ behind a proxy; None for the port of the server's address.
    """
    plan = read_app(folder)
    address = server_address(folder)
    until = expiry(folder / "server" / "server.crt")
    if until < datetime.now(UTC):
        raise PefllError(
            f"the server's certificate expired on {until:%Y-%m-%d}; make a new one: pefll flower renew {folder}",
            code="PEFLL-F423",
        )
    home = server_home(folder)
    make_private_folder(home)
    _report_tightened(tighten(folder), console)
    its_host, _, its_port = address.rpartition(":")
    host, port = host or its_host, port or int(its_port)
    check_port(host, port, folder)
    with exit_on_signals(), ExitStack() as stack:
        process = _start(stack, server_command(folder, host, port, home / "superlink.db"), home, "server")
        check = partial(process.check, "Flower's server")
        wait_for_server(f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", time.monotonic() + 60, check)
        say(console, f"{address}: clients whose keys are in {folder}/keys may connect")
        say(console, f"Next, when they are connected: pefll flower run {folder} ({counted(plan.rounds, 'round')})")
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
    code: Sequence[str] = (),
    limits: dict[str, Any] | None = None,
) -> None:
    """Run a client until it is ended.

    Args:
        folder: the client's folder, or the federation's.
        name: name of the client; needed with the federation's folder.
        data: file or folder with the client's samples.
        label: name of the column of labels in a table.
        model: file for the personal model; None for model.safetensors in the client's folder.
        counts: whether the client's hello says how many samples it has.
        console: console for messages.
        code: methods and models, in addition to pefll's own, that the server may name: package.module:Name.
        limits: fields of `Policy` that the owner sets; only the owner can loosen the default limits.
    """
    bundle = find_bundle(folder, name)
    policy = replace(bundle.policy, **(limits or {}))
    if not data.expanduser().exists():
        raise PefllError(f"there is no file or folder {data}", code="PEFLL-F424")
    check_server(bundle.address, bundle.folder / "ca.crt")
    check_key = partial(
        check_key_known, bundle.address, bundle.folder / "ca.crt", bundle.folder / "node.key", bundle.name
    )
    check_key()
    home = bundle.folder / ".flower"
    make_private_folder(home)
    _report_tightened(tighten(bundle.folder), console)
    config: dict[str, str | bool] = {
        "name": bundle.name,
        "data": str(data.expanduser().resolve()),
        "label": label,
        "state": str((bundle.folder / "state").resolve()),
        "model": str((model or bundle.folder / "model.safetensors").resolve()),
        "tells-counts": counts,
        **policy.to_node(),
    }
    command = client_command(bundle.folder, bundle.address, config, code=code)
    with exit_on_signals():
        say(console, f"{bundle.name} takes part with {data}, at {bundle.address}; Ctrl-C ends it")
        say(console, policy.sentence)
        if "methods" not in (limits or {}):
            say(console, "The server's operator chose these methods, in the client's folder; --methods names others")
        if bundle.ignored:
            say(
                console,
                f"{bundle.folder / 'client.toml'} asks for looser limits, without effect: only options loosen limits",
            )
        while True:
            with ExitStack() as once:
                node = _start(once, command, home, "supernode")
                while node.poll() is None:
                    time.sleep(0.2)
            # If this process was killed, the server believes for about a minute that the client is still connected.
            # Until it misses a heartbeat, it refuses a new process of this client.
            reason = exit_error("the SuperNode", node.last_output(), node.log)
            check_key()
            say(console, f"{reason}; it is started again in {AGAIN_SECONDS} s")
            time.sleep(AGAIN_SECONDS)


def server_home(folder: Path) -> Path:
    """Return Flower's home folder of a server: it has the database and the operator's address and secret."""
    return folder / ".flower"


def start_app(folder: Path, overrides: Sequence[str], console: Console) -> int:
    """Start a federation's app, show its output, and return its exit status.

    The app runs in the server. Ctrl-C ends the output here, but not the app; a message says so.

    Args:
        folder: folder of a federation whose server runs on this machine.
        overrides: settings of the app, each NAME=VALUE as in TOML.
        console: console for that message.
    """
    read_app(folder)
    renew_app(folder)
    home = server_home(folder)
    if not os.access(home / "credentials.yaml", os.R_OK):
        raise PefllError(
            f"you cannot read the operator's secret in {home}; start `pefll flower server {folder}` on this machine, "
            "as the same user",
            code="PEFLL-F003",
        )
    command, words = run_command(folder, overrides), environment(home.resolve()) | watchdog_environment()
    with exit_on_signals() as signals, ExitStack() as stack:
        process = subprocess.Popen(command, env=words, start_new_session=True)
        stack.callback(end_groups, process)
        return process.wait()
    say(
        console,
        f"the run goes on in the server, and its checkpoints are in {folder / 'run'}; to stop it, end `pefll flower "
        "server`; the next `pefll flower run` resumes it",
    )
    return 128 + signals[0]


def check_nothing_runs(folder: Path) -> None:
    """Raise PefllError if a run of a federation is under way, because a second app would fail in the server."""
    run = RunFolder(replace(read_app(folder), folder=str(folder.resolve())).run)
    if not run.path.is_dir():
        return
    try:
        with run.held():
            return
    except PefllError:
        raise PefllError(
            f"a run of {folder} is under way; wait for it, or end `pefll flower server` to stop it",
            code="PEFLL-F006",
        ) from None


def _start(stack: ExitStack, command: Sequence[str], home: Path, name: str) -> ShownProcess:
    """Start a process in a new process group; leaving the stack's block ends it."""
    process = ShownProcess(command, environment(home.resolve()) | watchdog_environment(), home / f"{name}.log")
    stack.callback(end_groups, process)
    return process


def _report_tightened(loose: Sequence[Path], console: Console) -> None:
    if loose:
        say(console, f"other users had rights on {counted(len(loose), 'path')} in {loose[0]}; these are removed")
