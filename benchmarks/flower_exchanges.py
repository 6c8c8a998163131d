"""Measures the cost of an exchange with real clients: in process, in Flower's simulation and in a local deployment.

An exchange sends every client a model of LeNet's size and gets a model back. A round has three exchanges, as in PeFLL.
Our app uses the client interface, with a task that returns its argument. Three other apps exchange the same numbers
without our code:

- natural: gets the model as an `ArrayRecord` of its named arrays, and returns it without reading it. Each client gets a
  new record, as contents differ by client.
- plain: reads the array that it gets and makes a message of arrays, on both sides, as every Flower app must.
- carried: gets the model as a single array, and returns it without reading it.

All apps take turns in the same run. We compare medians of times, and medians of our extra time in the same turn. Other
work on the machine affects the latter less. For simulations we also compare the processor time of all processes. The
bytes of one round of PeFLL are counted twice: by the client interface, and by a proxy for all clients' connections.

    make bench-flower                                            # all; without Ray the simulation is left out
    make bench-flower ARGS="--parts bytes --repeats 2"           # some; earlier results of the others are kept
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.flower_node import CARRIED, NATURAL, PLAIN, SimulatedNode, client
from benchmarks.flower_requests import Bytes, CountingProxy, Counts, OpeningProxy, since
from pefll.core.files import write_json
from pefll.core.plugins import CODE
from pefll.data.assembly import assemble
from pefll.data.client import Client
from pefll.data.federation import Federation
from pefll.data.samples import Normalise, Samples
from pefll.deploy.folder import make_federation
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import Plan, write_app
from pefll.deploy.processes import free_port
from pefll.engines.flower.inprocess import InProcessGrid, write_client
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import FORMAT
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.flower.server.exchange import OutgoingRequest, exchange
from pefll.engines.flower.server.terms import Terms
from pefll.engines.hardware import processor
from pefll.methods.contract import Cohort, Problem, Score, each
from pefll.training.summary import commit

TERMS = Terms(exchange_seconds=300, round_seconds=3000)
RESULT = "result.json"
IDLE_SECONDS = 30
TLS_RECORD = 22  # bytes that a TLS record adds to its content
RECORDS = 4  # TLS records of a small request: head and content of the request and of the answer
EXCHANGES = 3  # exchanges of a round, as in PeFLL
COUNTED = {"pefll": ("PeFLL", 3), "fedavg": ("FedAvg", 1)}  # counted methods: title, exchanges per round
WAYS = ("ours", "natural", "plain", "carried")
BACKEND = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


class Server(NamedTuple):
    """The model that is exchanged, [D]."""

    theta: Tensor


@dataclass(frozen=True)
class Echo:
    """A method whose clients return their argument, so that only the exchange takes time."""

    problem: Problem

    trains_in_rounds: ClassVar[bool] = True
    uses_labels: ClassVar[bool] = False
    trains_new_clients: ClassVar[bool] = False
    local_steps: ClassVar[int] = 0
    local_epochs: ClassVar[int] = 0
    batch_size: ClassVar[int] = 1

    def init(self, seed: int, cohort: Cohort) -> Server:
        """Draw a model."""
        del cohort
        return Server(self.problem.model.init(seed, "model"))

    def round(self, server: Server, cohort: Cohort) -> Server:
        """Send a model to each client and get it back; the replies are not used."""
        for _ in range(EXCHANGES):
            cohort.run(self.echo, each(server.theta.expand(cohort.size, -1)))
        return server

    def echo(self, client: Client, theta: Tensor) -> Tensor:
        """Return the model."""
        del client
        return theta

    def personalize(self, server: Server, cohort: Cohort) -> Tensor:
        """Return the model for each client."""
        return server.theta.expand(cohort.size, -1)

    def descriptors(self, server: Server, cohort: Cohort) -> None:
        """Return nothing."""

    def predict(self, client: Client, theta: Tensor, split: int) -> Score:
        """Score nothing."""
        raise NotImplementedError


def federation_of(clients: int) -> Federation:
    """Return a federation whose clients have 32 random images of CIFAR's shape each."""
    rng = np.random.default_rng(0)
    samples = Samples(
        x=rng.integers(0, 256, size=(40 * clients, 3, 32, 32), dtype=np.uint8),
        y=rng.integers(0, 10, size=40 * clients),
        classes=10,
        normalise=Normalise((0.5,) * 3, (0.25,) * 3),
    )
    split = np.tile(np.repeat(np.arange(3, dtype=np.int8), (32, 4, 4)), clients)
    return assemble(samples, np.repeat(np.arange(clients), 40), split, clients, "made up")


def agreement_of(clients: int, method: str, model: str = "lenet") -> Agreement:
    """Return an agreement on a model for images of CIFAR's shape."""
    return Agreement(
        method=method,
        model=model,
        input_shape=(3, 32, 32),
        classes=10,
        num_clients=clients,
        settings={"local_steps": 2} if method == "pefll" else {},
        normalise=Normalise((0.5,) * 3, (0.25,) * 3),
    )


ECHO = "benchmarks.flower_exchanges:Echo"
os.environ.setdefault(CODE, ECHO)  # also for the processes that are started here
server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main_of_server(grid: Grid, context: Context) -> None:
    """Do the measurement that the run config names, and write the result into the federation's folder."""
    plan = Plan.from_config(context.run_config)
    place = Path(plan.folder) / RESULT
    found = measure(grid, plan)
    place.with_suffix(".part").write_text(json.dumps(found))
    place.with_suffix(".part").rename(place)


def measure(grid: Grid, plan: Plan) -> dict[str, Any]:
    """Return the seconds of exchanges, ours and Flower's in turns; for a real method, the bytes of one round."""
    engine = FlowerEngine(grid, plan.agreement, plan.names, len(plan.names), TERMS, print)
    try:
        engine.roster.wait_for(len(plan.names), 600)
        state = engine.start()
        if plan.agreement.method != ECHO:
            before = engine.ledger.copy()
            seconds = _between_marks(Path(plan.folder) / "round", partial(engine.advance, state, 0, 1))
            counted = engine.ledger.since(before)
            idle = _between_marks(Path(plan.folder) / "idle", partial(time.sleep, IDLE_SECONDS))
            return {"down": counted.down, "up": counted.up, "seconds": seconds, "idle_seconds": idle}
        found: dict[str, list[float]] = {name: [] for way in WAYS for name in (way, f"{way}_cpu")}
        model = engine.method.problem.model
        layers = {name: part.numpy() for name, part in model.unflatten(state.theta).items()}
        one = {"theta": state.theta.numpy()}
        pauses = np.random.default_rng(0)
        for t in range(plan.rounds + 2):  # the first two are not counted: caches are cold
            jobs = [
                ("ours", partial(engine.advance, state, t, 1)),
                ("natural", partial(_of_flower, grid, engine, layers, NATURAL)),
                ("plain", partial(_of_flower, grid, engine, one, PLAIN)),
                ("carried", partial(_of_flower, grid, engine, one, CARRIED)),
            ]
            for name, job in jobs[t % len(jobs) :] + jobs[: t % len(jobs)]:
                # Flower's simulation looks for messages every 0.1 s. No app may always start at the best time for it.
                time.sleep(0.1 * pauses.random())
                cpu_before, began = cpu_seconds(), time.monotonic()
                job()
                found[name].append((time.monotonic() - began) / EXCHANGES)
                found[f"{name}_cpu"].append((cpu_seconds() - cpu_before) / EXCHANGES)
        return {name: seconds[2:] for name, seconds in found.items()}
    finally:
        engine.close()


def _between_marks(place: Path, work: Callable[[], Any]) -> float:
    """Write a file before and after `work`, which tell the counter when it began and ended; return its seconds."""
    began = time.monotonic()
    place.with_suffix(".begins").touch()
    time.sleep(1)
    work()
    place.with_suffix(".ends").touch()
    seconds = time.monotonic() - began
    time.sleep(1)
    return seconds


def _of_flower(grid: Grid, engine: FlowerEngine, model: dict[str, NDArray[Any]], kind: str) -> None:
    """Do the exchanges of a round without our code, and look for replies as often as our code does."""

    def read(_: int, content: RecordDict) -> Any:
        return content["model"].to_numpy_ndarrays() if kind == PLAIN else content

    for _ in range(EXCHANGES):
        letters = {
            number: OutgoingRequest(
                node, kind, RecordDict({"model": ArrayRecord({name: Array(part) for name, part in model.items()})})
            )
            for number, node in enumerate(engine.roster.nodes.values())
        }
        outcome = exchange(grid, letters, TERMS.exchange_seconds, "plain", read)
        assert len(outcome.replies) == len(letters), outcome.faults


def cpu_seconds() -> float:
    """Return the processor time so far of this process and of all running processes that it started."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, rest = int(place.parent.name), place.read_text().rpartition(")")[2].split()
            parents[pid], ticks[pid] = int(rest[1]), int(rest[11]) + int(rest[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")


def row(mode: str, clients: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return medians, and our extra time over the other apps."""
    others = {"natural": "natural_echo", "plain": "plain_app", "carried": "carrying"}
    middle = {name: statistics.median(values) for name, values in found.items()}
    line: dict[str, Any] = {"mode": mode, "clients": clients, "seconds_per_exchange": round(middle["ours"], 4)}
    line |= {f"seconds_of_{words}": round(middle[way], 4) for way, words in others.items()}
    for way, words in others.items():
        turns = [ours / other - 1 for ours, other in zip(found["ours"], found[way], strict=True)]
        line[f"over_{words}_per_cent"] = round(100 * (middle["ours"] / middle[way] - 1), 1)
        line[f"over_{words}_of_the_same_turn_per_cent"] = round(100 * statistics.median(turns), 1)
        if mode == "simulation":  # deployed clients are other processes, and in process the times are too short
            line[f"cpu_over_{words}_per_cent"] = round(100 * (middle["ours_cpu"] / middle[f"{way}_cpu"] - 1), 1)
    line |= {name: [round(value, 4) for value in values] for name, values in found.items()}
    print({key: value for key, value in line.items() if key not in found}, flush=True)
    return line


def plan_of(clients: int, method: str, folder: Path, repeats: int, model: str = "lenet") -> Plan:
    """Return a plan for the benchmark."""
    names = tuple(client_name(number) for number in range(clients))
    return Plan(agreement_of(clients, method, model), names, str(folder), rounds=repeats, clients_per_round=clients)


def write_clients(clients: int, folder: Path) -> None:
    """Write the data file of every client."""
    federation = federation_of(clients)
    for number in range(clients):
        write_client(federation, number, folder / f"{client_name(number)}.npz")


def in_process(clients: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Measure without a network."""
    write_clients(clients, folder)
    plan = plan_of(clients, ECHO, folder, repeats)
    nodes = {
        1000 + number: {"name": name, "data": str(folder / f"{name}.npz")} for number, name in enumerate(plan.names)
    }
    return row("in process", clients, measure(InProcessGrid(client, nodes, plan.to_config()), plan))


def simulation(clients: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Measure in Flower's simulation, with Ray."""
    import ray  # noqa: F401  (Flower would end the process where it is missing)
    from flwr.simulation import run_simulation

    write_clients(clients, folder)
    plan = replace(plan_of(clients, ECHO, folder, repeats), simulation_data=str(folder))
    found: dict[str, Any] = {}
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main_of_simulation(grid: Grid, context: Context) -> None:
        del context
        found.update(measure(grid, plan))

    run_simulation(app, SimulatedNode(plan.to_config()), clients, backend_config=BACKEND)
    return row("simulation", clients, found)


def content(clients: int, folder: Path) -> dict[str, Any]:
    """Count the bytes of one round of PeFLL at the client interface and in Flower's encoded messages."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    write_clients(clients, folder)
    plan = plan_of(clients, "pefll", folder, 1)
    nodes = {
        1000 + number: {"name": name, "data": str(folder / f"{name}.npz")} for number, name in enumerate(plan.names)
    }
    grid = InProcessGrid(client, nodes, plan.to_config())
    engine = FlowerEngine(grid, plan.agreement, plan.names, clients, TERMS, print)
    state = engine.start()
    before, written = engine.ledger.copy(), [0, 0]

    def transport(node: int, request: Any, deliver: Callable[[Any], Any]) -> list[Any]:
        del node
        reply = deliver(request)
        for direction, message in enumerate((request, reply)):
            written[direction] += sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
        return [reply]

    grid.transport = transport
    engine.advance(state, 0, 1)
    engine.close()
    door = engine.ledger.since(before)
    line = {
        "mode": "messages of one round of PeFLL",
        "clients": clients,
        "door_down": door.down,
        "door_up": door.up,
        "messages_down": written[0],
        "messages_up": written[1],
        "messages_over_door_per_cent": round(100 * (sum(written) / (door.down + door.up) - 1), 2),
    }
    print(line, flush=True)
    return line


def deployment(clients: int, repeats: int, folder: Path, method: str = ECHO, model: str = "lenet") -> dict[str, Any]:
    """Measure with a server and clients as processes, TLS and keys."""
    (folder / "data").mkdir()
    write_clients(clients, folder / "data")
    plan = plan_of(clients, method, folder / "fed", repeats, model)
    home = folder / "fed"
    made = make_federation(home, plan, f"127.0.0.1:{free_port()}")
    write_app(home, "fed", made, "benchmarks.flower_exchanges:server", "benchmarks.flower_node:client")
    port = free_port()
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    app = "benchmarks.flower_node:client"
    with Loopback(folder / "logs", folder / "home", folder=home, client_app=app, client_code=(ECHO,)) as there:
        there.start_server()
        target = int(there.address.rpartition(":")[2])
        opening = None
        if method != ECHO:  # exchanges are timed without the second proxy
            opened_at = free_port()
            opening = OpeningProxy(opened_at, target, home / "server")
            target = opened_at
        proxy = CountingProxy(port, target)
        for name in plan.names:
            there.start_client(name, folder / "data" / f"{name}.npz", through=f"127.0.0.1:{port}")
        process = there.start_run()
        counts: dict[str, dict[str, int]] = {}
        opened: dict[str, Counts] = {}
        while process.poll() is None:
            for moment in ("round.begins", "round.ends", "idle.begins", "idle.ends"):
                if moment not in counts and (home / moment).exists():
                    counts[moment] = proxy.counts()
                    opened[moment] = opening.counts() if opening else {}
            time.sleep(0.05)
        proxy.close()
        if not (home / RESULT).exists():
            raise RuntimeError(there.log("run")[-3000:])
        found: dict[str, Any] = json.loads((home / RESULT).read_text())
    if method == ECHO:
        return row("deployment", clients, found)
    return {"model": model} | byte_row(method, clients, found, counts, opened)


def byte_row(
    method: str, clients: int, found: dict[str, Any], counts: dict[str, dict[str, int]], opened: dict[str, Counts]
) -> dict[str, Any]:
    """Return which bytes a round has.

    Args:
        method: one of `COUNTED`.
        clients: number of clients.
        found: counts of the client interface, on the server.
        counts: counts of the proxy that does not decrypt, at the start and end of the round and of the idle time.
        opened: counts of the proxy that decrypts, at the same times.
    """
    wire, idle = (
        {key: counts[f"{part}.ends"][key] - before for key, before in counts[f"{part}.begins"].items()}
        for part in ("round", "idle")
    )
    door = found["down"] + found["up"]
    requests = since(opened["round.begins"], opened["round.ends"])
    plain = sum(part.heads + part.up + part.down for part in requests.values())
    # Only requests that got a message are needed. Each other request is as large as one during the idle time.
    asking = next((part for path, part in requests.items() if path.endswith("pull-messages")), Bytes())
    idle_asking = since(opened["idle.begins"], opened["idle.ends"])
    one = next((part for path, part in idle_asking.items() if path.endswith("pull-messages")), Bytes(1))
    title, exchanges = COUNTED[method]
    polls = asking.requests - exchanges * clients
    poll_bytes = polls * ((one.heads + one.up + one.down) / one.requests + RECORDS * TLS_RECORD)
    beats = next((part for path, part in requests.items() if path.endswith("send-node-heartbeat")), Bytes())
    beat_bytes = beats.heads + beats.up + beats.down + beats.requests * RECORDS * TLS_RECORD
    all_bytes = wire["down"] + wire["up"]
    line = {
        "mode": f"deployment, one round of {title}",
        "clients": clients,
        "seconds_of_round": round(found["seconds"], 2),
        "door_down": found["down"],
        "door_up": found["up"],
        "wire_down": wire["down"],
        "wire_up": wire["up"],
        "requests": sum(part.requests for part in requests.values()),
        "connections": wire["connections"],
        "polls_in_vain": polls,
        "idle_bytes_per_client_and_second": round((idle["down"] + idle["up"]) / found["idle_seconds"] / clients, 1),
        "overhead_bytes_per_client": round((all_bytes - door) / clients),
        "wire_over_door_per_cent": round(100 * (all_bytes / door - 1), 2),
        "without_polls_per_cent": round(100 * ((all_bytes - poll_bytes) / door - 1), 2),
        "without_polls_and_heartbeats_per_cent": round(100 * ((all_bytes - poll_bytes - beat_bytes) / door - 1), 2),
        "of_the_door_per_cent": {
            "heads": round(100 * sum(part.heads for part in requests.values()) / door, 3),
            "content_beyond_the_door": round(
                100 * (sum(part.up + part.down for part in requests.values()) / door - 1), 3
            ),
            "tls": round(100 * (all_bytes - plain) / door, 3),
        },
        "by_request": {path: part._asdict() for path, part in requests.items()},
    }
    print(json.dumps(line, indent=1), flush=True)
    return line


def main() -> None:
    """Do all measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/flower_exchanges.json"))
    parser.add_argument("--repeats", type=int, default=10, help="a deployment is measured a quarter as often")
    parts = ["in_process", "simulation", "deployment", "content", "bytes"]
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--add", action="store_true", help="keep earlier measurements of these parts too")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    before = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    words = f"--parts {' '.join(given.parts)} --repeats {given.repeats}"
    measured = {"command": f"python -m benchmarks.flower_exchanges {words}", "commit": commit(), "format": FORMAT}
    jobs: list[tuple[str, Callable[[Path], dict[str, Any]]]] = [
        ("in_process", lambda folder: in_process(8, 4 * given.repeats, folder)),
        ("simulation", lambda folder: simulation(8, 4 * given.repeats, folder)),
        ("simulation", lambda folder: simulation(100, 2 * given.repeats, folder)),
        ("deployment", lambda folder: deployment(8, -(-given.repeats // 4), folder)),
        ("content", lambda folder: content(8, folder)),
        ("bytes", lambda folder: deployment(8, 1, folder, "pefll")),
        ("bytes", lambda folder: deployment(2, 1, folder, "pefll")),
        ("bytes", lambda folder: deployment(2, 1, folder, "pefll", "resnet20")),
        ("bytes", lambda folder: deployment(2, 1, folder, "fedavg")),
    ]
    for part, job in jobs:
        if part in given.parts:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = job(Path(folder))
                    when = datetime.now(UTC).isoformat(timespec="seconds")
                    rows.append({"part": part} | found | measured | {"finished": when})
                except ImportError as error:
                    print(f"left out, for want of {error.name}", flush=True)
    record = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "flwr": "1.41.0",
        "numbers_in_a_model": agreement_of(1, ECHO).build().problem.model.size,
        "rows": [row for row in before if given.add or row["part"] not in {new["part"] for new in rows}] + rows,
    }
    write_json(given.out, record)


if __name__ == "__main__":
    main()
