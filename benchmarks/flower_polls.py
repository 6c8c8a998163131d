"""Measures what a waiting client costs the server: requests for messages, signed with keys on two curves.

A node asks for messages every 3 s, with a signature that the server checks. So the cost of one request decides how many
clients a server can have. Here some nodes with each type of key ask a SuperLink with TLS, in turns, one request after
another, as fast as it answers. The result is the server's processor time for a request, less its processor time without
requests, and the bytes of a request. This is measured with a database on disk, as in `pefll flower server`, and with a
database in memory. The database on disk lets a restarted server know its nodes.

    python -m benchmarks.flower_polls
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import flwr
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supernode.fleet_http_connection import http_request_response

from benchmarks.flower_alone import register, superlink_command
from benchmarks.flower_requests import CountingProxy
from pefll.core.files import write_json
from pefll.deploy.certificates import make_certificates, make_node_key
from pefll.deploy.loopback import Loopback
from pefll.deploy.processes import free_port, server_command, wait_for_server
from pefll.engines.hardware import processor
from pefll.training.summary import commit

CURVES: dict[str, ec.EllipticCurve] = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1()}
SECONDS_BETWEEN_POLLS = 3  # a constant of Flower


def server_seconds(pid: int) -> float:
    """Return the processor time that a process has taken so far."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    nodes: int, polls: int, turns: int, database: Path | None, folder: Path, alone: bool = False
) -> dict[str, Any]:
    """Return what a request costs the server, for each type of key.

    Args:
        nodes: number of nodes with each type of key.
        polls: number of requests with each type of key in a turn.
        turns: number of turns, after one that is not counted.
        database: file of the server's database; None for a database in memory.
        folder: folder for all other files.
        alone: whether the server is Flower's own program, without our gateway.
    """
    make_certificates(folder / "server", ["127.0.0.1"])
    target, port = free_port(), free_port()
    authority = folder / "server" / "ca.crt"
    asking: dict[str, list[Callable[[], Any]]] = {curve: [] for curve in CURVES}
    found: dict[str, dict[str, list[float]]] = {curve: {"server_ms": [], "bytes": []} for curve in CURVES}
    with Loopback(folder / "logs", folder / "home") as processes, ExitStack() as connections:
        keys = {(curve, n): folder / "keys" / f"{curve}-{n}" for curve in CURVES for n in range(nodes)}
        for (curve, _), path in keys.items():
            make_node_key(path, path.with_suffix(".pub"), CURVES[curve])
        command = server_command(folder, "127.0.0.1", target, database)
        server = processes.start("server", superlink_command(folder, target, database) if alone else command)
        wait_for_server(f"127.0.0.1:{target}", time.monotonic() + 60)
        if alone:
            register([path.with_suffix(".pub") for path in keys.values()], f"127.0.0.1:{target}", authority)
        proxy = CountingProxy(port, target)
        for (curve, _), path in keys.items():
            key = serialization.load_ssh_private_key(path.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            connection = http_request_response(
                f"127.0.0.1:{port}", False, authority.read_bytes(), (key, key.public_key())
            )
            asking[curve].append(connections.enter_context(connection)[1])
        before = server_seconds(server.pid)
        time.sleep(5)
        idle = (server_seconds(server.pid) - before) / 5
        for turn in range(turns + 1):
            for curve, receivers in asking.items():
                start, taken, wire = time.perf_counter(), server_seconds(server.pid), proxy.counts()
                for number in range(polls):
                    assert receivers[number % nodes]() is None  # there is no message
                seconds = time.perf_counter() - start
                taken = server_seconds(server.pid) - taken - idle * seconds
                sent = proxy.counts()
                if turn:  # the first turn opens connections and loads code
                    found[curve]["server_ms"].append(1000 * taken / polls)
                    found[curve]["bytes"].append((sum(sent[k] - wire[k] for k in ("up", "down"))) / polls)
        proxy.close()
    return {"idle_server_share": round(idle, 3)} | {curve: summary(values) for curve, values in found.items()}


def summary(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and how many waiting nodes would use a complete core."""
    server_ms = statistics.median(values["server_ms"])
    return {
        "server_ms_per_poll": round(server_ms, 3),
        "turns": [round(value, 3) for value in values["server_ms"]],
        "bytes_per_poll": round(statistics.median(values["bytes"])),
        "nodes_for_a_core": round(SECONDS_BETWEEN_POLLS * 1000 / server_ms),
    }


def main() -> None:
    """Do all measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="of each kind of key")
    parser.add_argument("--polls", type=int, default=400, help="of each kind of key in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/flower_polls.json"))
    given = parser.parse_args()
    found = {}
    for kind in ("database", "memory"):
        with tempfile.TemporaryDirectory() as folder:
            database = Path(folder) / "superlink.db" if kind == "database" else None
            found[kind] = measure(given.nodes, given.polls, given.turns, database, Path(folder))
    words = f"--nodes {given.nodes} --polls {given.polls} --turns {given.turns}"
    record = {
        "command": f"python -m benchmarks.flower_polls {words}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "flwr": flwr.__version__,
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    } | found
    print(record)
    write_json(given.out, record)


if __name__ == "__main__":
    main()
