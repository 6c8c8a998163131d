"""The demo on one machine: simulated rounds, then rounds with real clients, then a client that joins later."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.progress import Monitor, monitor, say
from pefll.core.tree import Tree, named_leaves
from pefll.core.wording import argument, counted
from pefll.data import TEST, TRAIN, Federation, load_samples, make_federation
from pefll.deploy.folder import add_client
from pefll.deploy.folder import make_federation as make_folder
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import Plan
from pefll.deploy.process_output import error_line
from pefll.deploy.processes import free_port
from pefll.deploy.simulation import simulate
from pefll.engines.flower.inprocess import write_client
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.serial import SerialEngine
from pefll.runs import checkpoint
from pefll.runs.personal import PersonalModel
from pefll.runs.record import RunFolder
from pefll.training.evaluation import client_scores
from pefll.training.run import Run

SETTINGS = {"client_lr": 0.05, "local_steps": 10, "server_lr": 1e-3, "embedding": "linear"}
NEWCOMER = "newcomer"
SIMULATED, STRETCH = 200, 20
# A client's replies: per round; outside rounds (1 to hello, 2 in the evaluation, 2 in the test); all of the newcomer.
IN_ROUND, BESIDE, LATER = 3, 5, 4
_REPLY = re.compile(r"Push replies from node_id=")


def demo(folder: Path, clients: int, rounds: int, console: Console, simulated: int = SIMULATED) -> None:
    """Simulate rounds of PeFLL, continue with clients as separate processes, and make a model for a new client.

    Args:
        folder: folder for all files; the files of an earlier demo are replaced.
        clients: number of clients that train.
        rounds: number of rounds with real clients.
        console: console to print on.
        simulated: number of simulated rounds before them, in this process.
    """
    started = time.monotonic()
    _check(folder, clients, rounds, simulated)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    federation = digits(clients)
    names = [client_name(number) for number in range(clients)]
    for number, name in enumerate([*names, NEWCOMER]):
        write_client(federation, number, folder / "data" / f"{name}.npz")
    home, agreed = folder / "federation", agreement_of(federation)
    total = simulated + rounds  # one evaluation at the end: so the last round is the one that is kept
    plan = Plan(agreed, tuple(names), rounds=total, clients_per_round=clients, eval_every=total)
    make_folder(home, plan, f"127.0.0.1:{free_port()}")
    say(console, f"1. {home}: a federation of {counted(clients, 'client')}, with certificates and a key for each")

    say(console, f"2. First, {counted(simulated, 'round')} are simulated: pefll flower simulate {home} ...")
    before = simulate(home, folder / "data", simulated, console)
    say(
        console, f"   {home}/run: PeFLL on {counted(clients, 'client')} with different digits, {_seen_accuracy(before)}"
    )

    say(console, f"3. Real clients continue this run: a server and {counted(clients, 'client')}. Each is a process")
    say(console, f"   with TLS and its own key, as on other machines. The logs are in {folder}/logs")
    with Loopback(folder / "logs", folder.resolve() / "flower", folder=home) as there:
        with monitor(console, "   starting them", clients + 1) as watch:
            _start(there, folder, names, watch)
        with _replies(there, console, "   replies of clients", clients * (IN_ROUND * rounds + BESIDE)) as look:
            there.run(120 + 60 * clients * rounds, watched=["server", *names], look=look)
        if (RunFolder(home / "run").summary() or {}).get("rounds") != total:
            raise _early_end(there, "run")
        say(
            console,
            f"   {_rounds_are(simulated + 1, total)} done; the {_compared_with_simulation(home, before, federation)}",
        )

        say(console, f"4. These clients leave, and a new one joins, {NEWCOMER}: pefll flower add {home} {NEWCOMER}")
        there.end(*names)
        add_client(home, NEWCOMER)
        with monitor(console, "   starting it", 1) as watch:
            _start_clients(there, folder, [NEWCOMER], watch)
        say(console, f"   its descriptor goes up, its model comes down: pefll flower personalize {home}")
        with _replies(there, console, "   its replies", LATER) as look:
            there.run(120 + 30 * clients, "personalize", ["server", NEWCOMER], look, task="personalize")
        if not (folder / "me.safetensors").exists():
            raise _early_end(there, "personalize")
    _report_accuracy(folder, federation, before.config.rounds, console)
    say(console, f"Done in {time.monotonic() - started:.0f} s; everything that was started is ended.")


def _check(folder: Path, clients: int, rounds: int, simulated: int) -> None:
    """Raise PefllError for arguments that the demo cannot take."""
    if not 2 <= clients <= 64:
        raise PefllError(f"the demo has 2 to 64 clients, not {clients:,}", code="PEFLL-F120")
    if rounds < 1 or simulated < 1:
        raise PefllError("the demo needs at least one simulated round and one round with clients", code="PEFLL-F121")
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / "federation" / "pyproject.toml").exists())
    ):
        another = argument("folder", option="--out")
        raise PefllError(
            f"{folder} exists and is not from an earlier demo; choose another {another}", code="PEFLL-F122"
        )


def _start(there: Loopback, folder: Path, names: list[str], watch: Monitor) -> None:
    """Start the server and the training clients, and wait until all are connected."""
    there.start_server()
    watch.at(1)
    _start_clients(there, folder, names, watch, done=1)


def _start_clients(there: Loopback, folder: Path, names: list[str], watch: Monitor, done: int = 0) -> None:
    """Start clients, and wait until the server has admitted all of them."""
    for name in names:
        there.start_client(name, folder / "data" / f"{name}.npz", _model(folder, name))
    ends = time.monotonic() + 120
    while (connected := sum("SuperNode ID" in there.log(name) for name in names)) < len(names):
        there.check(*names)
        if time.monotonic() > ends:
            raise PefllError(f"clients did not connect within 120 s; see {folder}/logs", code="PEFLL-F123")
        watch.at(done + connected)
        time.sleep(0.1)
    watch.at(done + connected)


def _model(folder: Path, name: str) -> Path:
    return folder / ("me.safetensors" if name == NEWCOMER else f"{name}.safetensors")


@contextmanager
def _replies(there: Loopback, console: Console, title: str, expected: int) -> Iterator[Callable[[], None]]:
    """Show the number of client replies in the server's log; yield a function that updates it."""
    before, shown = len(_REPLY.findall(there.log("server"))), 0
    with monitor(console, title, expected) as watch:

        def look() -> None:
            nonlocal shown
            came = min(expected, len(_REPLY.findall(there.log("server"))) - before)
            if came > shown:
                shown = came
                watch.at(came)

        yield look


def _early_end(there: Loopback, name: str) -> PefllError:
    """Return the error for a run that ended without a result."""
    log = there.logs / f"{name}.log"
    return PefllError(
        f"the run ended too early with {error_line(there.log(name))!r}; see {log} for its output", code="PEFLL-F124"
    )


def digits(clients: int, seed: int = 0) -> Federation:
    """Return the demo's data: `clients` training clients, and one client that joins later."""
    samples = load_samples("digits", Path("."))
    return make_federation(samples, partition="dirichlet 0.5", clients=clients + 1, seed=seed, unseen=1 / (clients + 1))


def agreement_of(federation: Federation, method: str = "pefll", model: str = "tiny", **settings: object) -> Agreement:
    """Return the agreement for the clients of a simulated federation."""
    return Agreement(
        method=method,
        settings={**SETTINGS, **settings} if method == "pefll" else dict(settings),
        model=model,
        input_shape=federation.input_shape,
        classes=federation.classes,
        num_clients=federation.num_seen,
        normalise=federation.normalise,
        class_names=federation.class_names,
        dataset=federation.name,
    )


def _rounds_are(first: int, last: int) -> str:
    return f"round {first} is" if first == last else f"rounds {first} to {last} are"


def _seen_accuracy(run: Run) -> str:
    accuracy = run.summary["accuracy"]["best"]["seen"]["per_sample"]
    return f"right on {accuracy:.0%} of their test samples"


def _compared_with_simulation(home: Path, before: Run, federation: Federation) -> str:
    """Return a sentence that says whether the server's state has the same bits as a simulation of all rounds."""
    saved = checkpoint.latest(RunFolder(home / "run").checkpoints, lambda damage: None)
    first = before.config.rounds
    engine = SerialEngine(_seen_only(federation), before.method, before.config.seed, federation.num_seen)
    try:
        state: Tree = engine.advance(before.final, first, saved.round - first)
    finally:
        engine.close()
    same = all(torch.equal(saved.tensors[f"server.{name}"], leaf) for name, leaf in named_leaves(state))
    return f"server's state is {'bit for bit' if same else 'NOT'} that of a simulation of all rounds"


def _seen_only(federation: Federation) -> Federation:
    """Return the federation without its unseen client."""
    seen = federation.num_seen
    return replace(federation, offset=federation.offset[:, :seen], count=federation.count[:, :seen])


def _report_accuracy(folder: Path, federation: Federation, rounds: int, console: Console) -> None:
    """Print the newcomer's accuracy with its own model, with a global model, and with its most frequent digit."""
    content = np.load(folder / "data" / f"{NEWCOMER}.npz")
    x, y, split = content["x"], content["y"], content["split"]
    mine = split == TEST
    model = PersonalModel.load(folder / "me.safetensors")
    right = float((model.predict(x[mine]) == y[mine]).mean())
    often = float((y[mine] == np.bincount(y[split == TRAIN]).argmax()).mean())
    one_for_all = _fedavg_accuracy(federation, rounds, console)
    samples = counted(int(mine.sum()), "test sample")
    say(console, f"   {folder}/me.safetensors: the new client's own model is right on {right:.0%} of its {samples}.")
    say(
        console,
        f"   One model for all, trained as long with FedAvg: {one_for_all:.0%}. Always its most frequent digit: "
        f"{often:.0%}.",
    )


def _fedavg_accuracy(federation: Federation, rounds: int, console: Console) -> float:
    """Return the newcomer's accuracy with the global model of FedAvg, simulated with the same clients."""
    rate, steps = SETTINGS["client_lr"], SETTINGS["local_steps"]
    method = agreement_of(federation, "fedavg", client_lr=rate, local_steps=steps).build()
    engine = SerialEngine(federation, method, 0, federation.num_seen)
    try:
        state = engine.start()
        with monitor(console, "   one model for all, to compare", rounds) as watch:
            for first in range(0, rounds, STRETCH):
                state = engine.advance(state, first, min(STRETCH, rounds - first))
                watch.at(min(first + STRETCH, rounds))
        sums = client_scores(engine, method, state, np.array([federation.num_seen]), TEST)
    finally:
        engine.close()
    samples, correct = sums[0, :2]
    return float(correct / samples)
