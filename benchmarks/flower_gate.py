"""Compares our server and clients with Flower's own programs: a round of PeFLL, and a request for messages.

`pefll flower server` has a gateway in front of Flower's SuperLink, and `pefll flower client` is one process that
answers all messages. Flower's own server has no gateway, and its client starts a process for each message. Both do the
same rounds with the same app, in turns, in one run. Ratios are of the same turn, since other work on the machine slows
both.

    python -m benchmarks.flower_gate --out results/flower_gate.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import flwr
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks import flower_polls
from benchmarks.flower_alone import FlowerAlone
from benchmarks.flower_exchanges import RESULT, TERMS, plan_of, write_clients
from benchmarks.flower_requests import CountingProxy
from pefll.core.files import write_json
from pefll.deploy.folder import make_federation
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import Plan, write_app
from pefll.deploy.processes import free_port
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.hardware import processor
from pefll.training.summary import commit

WAYS = {"Flower alone": FlowerAlone, "ours": Loopback}
BEGINS, ENDS = "rounds.begin", "rounds.end"
POLLS, NODES = 150, 2
server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main_of_server(grid: Grid, context: Context) -> None:
    """Time rounds, and write the times into the federation's folder."""
    plan = Plan.from_config(context.run_config)
    folder = Path(plan.folder)
    engine = FlowerEngine(grid, plan.agreement, plan.names, len(plan.names), TERMS, print)
    try:
        engine.roster.wait_for(len(plan.names), 600)
        state = engine.advance(engine.start(), 0, 1)  # not counted: clients read their data
        before, seconds = engine.ledger.copy(), []
        (folder / BEGINS).touch()
        time.sleep(1)  # so that the counter sees it
        for t in range(1, plan.rounds + 1):
            began = time.monotonic()
            state = engine.advance(state, t, 1)
            seconds.append(time.monotonic() - began)
        counted = engine.ledger.since(before)
        (folder / ENDS).touch()
        time.sleep(1)
    finally:
        engine.close()
    place = folder / RESULT
    place.with_suffix(".part").write_text(json.dumps({"seconds": seconds, "door": counted.down + counted.up}))
    place.with_suffix(".part").rename(place)


def rounds_of(way: str, clients: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each round with one type of server and clients, and the bytes on the wire.

    Args:
        way: one of `WAYS`.
        clients: number of clients.
        rounds: number of rounds of PeFLL with LeNet, after one that is not counted.
        folder: folder for all files.
    """
    (folder / "data").mkdir()
    write_clients(clients, folder / "data")
    home, app = folder / "fed", "benchmarks.flower_node:client"
    plan = make_federation(home, plan_of(clients, "pefll", home, rounds), f"127.0.0.1:{free_port()}")
    write_app(home, "fed", plan, "benchmarks.flower_gate:server", app)
    paths = {str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with WAYS[way](folder / "logs", folder / "home", folder=home, client_app=app) as there:
        there.start_server()
        port = free_port()
        proxy = CountingProxy(port, int(there.address.rpartition(":")[2]))
        for name in plan.names:
            there.start_client(name, folder / "data" / f"{name}.npz", through=f"127.0.0.1:{port}")
        counts: dict[str, dict[str, int]] = {}
        process = there.start_run()
        while process.poll() is None:
            for moment in (BEGINS, ENDS):
                if moment not in counts and (home / moment).exists():
                    counts[moment] = proxy.counts()
            time.sleep(0.05)
        proxy.close()
        if not (home / RESULT).exists():
            raise RuntimeError(there.log("run")[-3000:] + there.log("server")[-3000:])
        found: dict[str, Any] = json.loads((home / RESULT).read_text())
    wire = sum(counts[ENDS][key] - counts[BEGINS][key] for key in ("up", "down"))
    return {
        "seconds": [round(value, 2) for value in found["seconds"]],
        "wire_over_door_per_cent": round(100 * (wire / found["door"] - 1), 2),
    }


def poll_of(way: str, kind: str, folder: Path) -> dict[str, Any]:
    """Return the server's processor time for a request for messages, and the request's bytes.

    Args:
        way: one of `WAYS`.
        kind: database, or memory.
        folder: folder for all files.
    """
    database = folder / "superlink.db" if kind == "database" else None
    found = flower_polls.measure(NODES, POLLS, 1, database, folder, alone=way != "ours")["P-256"]
    return {"server_ms": found["server_ms_per_poll"], "bytes": found["bytes_per_poll"]}


def side_by_side(measure: Any, turns: int) -> list[dict[str, Any]]:
    """Measure each of `WAYS` once in each turn; the first of a turn is the last of the next.

    Args:
        measure: function of (way, folder).
        turns: number of turns.
    """
    rows = []
    for turn in range(turns):
        row: dict[str, Any] = {}
        for way in sorted(WAYS, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as folder:
                row[way] = measure(way, folder=Path(folder))
        rows.append(row)
        print(row, flush=True)
    return rows


def compared(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the median of each of `WAYS`, and the median and range of ratios, ours to Flower's, in the same turn."""
    middle = [{way: statistics.median(_several(one[key])) for way, one in row.items()} for row in rows]
    ratios = [row["ours"] / row["Flower alone"] for row in middle]
    return {
        **{way: round(statistics.median(row[way] for row in middle), 3) for way in WAYS},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _several(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def main() -> None:
    """Do all measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of PeFLL in a turn")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/flower_gate.json"))
    given = parser.parse_args()
    words = f"--turns {given.turns} --rounds {given.rounds} --clients {given.clients} --out {given.out}"
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.flower_gate {words}",
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "flwr": flwr.__version__,
        "load_before": round(os.getloadavg()[0], 1),
    }
    rounds = side_by_side(partial(rounds_of, clients=given.clients, rounds=given.rounds), given.turns)
    record["round of PeFLL, LeNet"] = {
        "clients": given.clients,
        "seconds": compared(rounds, "seconds"),
        "wire_over_door_per_cent": compared(rounds, "wire_over_door_per_cent"),
        "turns": rounds,
    }
    for kind in ("database", "memory"):
        polls = side_by_side(partial(poll_of, kind=kind), given.turns)
        record[f"request for messages, {kind}"] = {
            "server_ms": compared(polls, "server_ms"),
            "bytes": compared(polls, "bytes"),
            "turns": polls,
        }
    record |= {"load_after": round(os.getloadavg()[0], 1)}
    write_json(given.out, record | {"finished": datetime.now(UTC).isoformat(timespec="seconds")})


if __name__ == "__main__":
    main()
