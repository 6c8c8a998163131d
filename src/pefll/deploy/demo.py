"""All of it on one machine: a server and some clients as processes of their own, and a client that comes later."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from pefll import checkpoint
from pefll.data import SPLITS, TEST, Federation, load_samples, make_federation
from pefll.deploy.folder import add_client
from pefll.deploy.folder import make_federation as make_folder
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import Plan
from pefll.deploy.processes import free_port
from pefll.engines.flower.agreement import Agreement
from pefll.engines.flower.member import client_name
from pefll.engines.serial import SerialEngine
from pefll.errors import PefllError
from pefll.personal import PersonalModel
from pefll.progress import say
from pefll.record import RunFolder
from pefll.tree import named_leaves
from pefll.wording import argument, counted

SETTINGS = {"client_lr": 0.05, "local_steps": 10, "server_lr": 2e-3, "embedding": "linear"}
NEWCOMER = "newcomer"


def demo(folder: Path, clients: int, rounds: int, console: Console) -> None:
    """Train PeFLL with clients that are processes of their own, and make a model for one more.

    Args:
        folder: for everything; what an earlier demo left there is replaced.
        clients: how many take part in training.
        rounds: of training.
        console: where to print.
    """
    if not 2 <= clients <= 64:
        raise PefllError("the demo has 2 to 64 clients")
    started = time.monotonic()
    if folder.exists() and any(folder.iterdir()) and not (folder / "federation" / "pyproject.toml").exists():
        another = argument("folder", option="--out")
        raise PefllError(f"{folder} exists and is not from an earlier demo; choose another {another}")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    federation = digits(clients)
    names = [client_name(number) for number in range(clients)]
    for number, name in enumerate([*names, NEWCOMER]):
        write_client(federation, number, folder / "data" / f"{name}.npz")
    agreed = agreement_of(federation)
    plan = Plan(agreed, tuple(names), rounds=rounds, clients_per_round=clients, eval_every=rounds)
    home = folder / "federation"
    make_folder(home, plan, f"127.0.0.1:{free_port()}")
    add_client(home, NEWCOMER)
    say(console, f"{home}: an app, certificates and {counted(clients + 1, 'key')}")
    with Loopback(folder / "logs", folder.resolve() / "flower", folder=home) as there:
        there.start_server()
        say(console, f"a server at {there.address}, with TLS and node authentication; logs are in {folder}/logs")
        for name in names:
            there.start_client(name, folder / "data" / f"{name}.npz", folder / f"{name}.safetensors")
        say(
            console,
            f"{counted(clients, 'client')}, each with its own digits; {counted(rounds, 'round')} of three exchanges: a "
            "minute or more",
        )
        text = there.run(120 + 60 * clients * rounds)
        _say_lines(text, console)
        _compare(home, federation, agreed, rounds, clients, console)
        there.start_client(NEWCOMER, folder / "data" / f"{NEWCOMER}.npz", folder / "me.safetensors")
        say(console, f"{NEWCOMER} has come, after training; now: pefll flower personalize {home}")
        _say_lines(there.run(120 + 30 * clients, "personalize", task="personalize"), console)
    _try_model(folder / "me.safetensors", folder / "data" / f"{NEWCOMER}.npz", console)
    say(console, f"Done in {time.monotonic() - started:.0f} s; everything that was started is ended.")


def digits(clients: int, seed: int = 0) -> Federation:
    """Return the demo's data: some clients that take part in training, and one that comes later."""
    samples = load_samples("digits", Path("."))
    return make_federation(samples, partition="dirichlet 0.3", clients=clients + 1, seed=seed, unseen=1 / (clients + 1))


def agreement_of(federation: Federation, method: str = "pefll", model: str = "tiny", **settings: object) -> Agreement:
    """Return what the clients of a simulated federation would agree on."""
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


def write_client(federation: Federation, client: int, path: Path) -> None:
    """Write one client's samples with their splits, in the order in which the federation has them."""
    rows = [federation.indices(client, split) for split in range(len(SPLITS))]
    split = np.repeat(np.arange(len(SPLITS)), [len(part) for part in rows])
    chosen = torch.cat(rows)
    np.savez(path, x=federation.x[chosen].numpy(), y=federation.y[chosen].numpy(), split=split)


def _compare(
    home: Path, federation: Federation, agreed: Agreement, rounds: int, clients: int, console: Console
) -> None:
    """Say whether the server has the same bits as after a simulation of the same clients in this process."""
    saved = checkpoint.latest(RunFolder(home / "run").checkpoints, lambda sentence: say(console, sentence))
    known = replace(federation, num_seen=clients)
    engine = SerialEngine(known, agreed.build(), agreed.seed, clients)
    try:
        state = engine.advance(engine.start(), 0, rounds)
    finally:
        engine.close()
    same = all(torch.equal(saved.tensors[f"server.{name}"], leaf) for name, leaf in named_leaves(state))
    say(console, f"The server's state is {'bit for bit' if same else 'NOT'} that of a simulation of these clients.")


def _try_model(model: Path, data: Path, console: Console) -> None:
    if not model.exists():
        raise PefllError(f"the new client got no model; see the logs beside {model}")
    content = np.load(data)
    mine = content["split"] == TEST
    right = float((PersonalModel.load(model).predict(content["x"][mine]) == content["y"][mine]).mean())
    say(
        console,
        f"{model}: the new client's own model is right on {right:.0%} of its {counted(int(mine.sum()), 'test sample')}",
    )


def _say_lines(text: str, console: Console) -> None:
    """Print what the app itself said, without Flower's own lines."""
    for line in text.splitlines():
        if line.strip() and not any(
            word in line for word in ("INFO", "SuperLink", "Successfully", "WARNING", "config")
        ):
            say(console, f"  {line}")
