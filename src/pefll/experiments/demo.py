"""The demo: compares Local, FedAvg and PeFLL on unseen clients. Its data needs no download."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors
from pefll.core.progress import monitor, say
from pefll.core.wording import argument
from pefll.data import TEST, TRAIN, VALIDATION, Federation, load_samples, make_federation
from pefll.report import curves, descriptor_map, federation_picture, mean_std_text
from pefll.runs.record import RunFolder
from pefll.runs.titles import TITLES
from pefll.training.fitting import fit
from pefll.training.run import Run

# These learning rates are best on the validation samples of seen clients (benchmarks/demo_grid.py).
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {"client_lr": 5e-3},
    "fedavg": {"client_lr": 0.02, "local_steps": 10},
    "pefll": {"client_lr": 0.05, "local_steps": 10, "server_lr": 2e-3, "embedding": "linear"},
}
CLIENTS, UNSEEN, PARTITION, ROUNDS, PER_ROUND = 100, 0.3, "dirichlet 0.3", 250, 10


def demo(folder: Path, seeds: int, console: Console) -> None:
    """Compare Local, FedAvg and PeFLL on handwritten digits, then make a personal model for a new client.

    Args:
        folder: folder for runs, pictures and the personal model; runs of an earlier demo are replaced.
        seeds: number of seeds; each seed makes other clients.
        console: console to print on.
    """
    if seeds < 1:
        raise PefllError(f"{argument('seeds')} is {seeds}; it must be at least 1", code="PEFLL-X004")
    started = time.monotonic()
    _clear(folder / "runs")
    say(
        console,
        f"1,797 handwritten digits at {CLIENTS} clients with about ten training samples each, {PARTITION}. "
        f"{UNSEEN:.0%} of the clients take no part in training; they get their models afterwards.\n"
        "Every client has a network with 4 hidden units. Local trains each network alone. FedAvg trains one for all. "
        "PeFLL generates one per client.",
    )
    jobs = [(method, seed) for method in SETTINGS for seed in range(seeds)]
    runs: dict[str, list[Run]] = {method: [] for method in SETTINGS}
    with monitor(console if console.is_terminal else None, "training", len(jobs)) as watch:
        for done, (method, seed) in enumerate(jobs, start=1):
            runs[method].append(
                _train(folder, method, seed, watch.say if console.is_terminal else partial(say, console))
            )
            watch.at(done)
    console.print(_table(runs))
    _personal_model(folder, runs, console)
    _pictures(folder, runs, seeds, console)
    say(console, f"Done in {time.monotonic() - started:.0f} s. Try next:")
    first = folder / "runs" / "pefll-0"
    for command in (
        f"pefll show {first} {folder}/runs/fedavg-0",
        f"pefll personalize {first} --data {folder}/new_client.npz --out {folder}/me.safetensors",
        f"pefll predict {folder}/me.safetensors --data {folder}/new_client_later.npz",
        "pefll train --data digits --partition 'by-class 3' --rounds 300 --out runs/first",
        "pefll data list",
    ):
        say(console, f"  .venv/bin/{command}" if Path(".venv/bin/pefll").exists() else f"  {command}")


def clients(seed: int) -> Federation:
    """Return the demo's federation for a seed."""
    samples = load_samples("digits", Path("."))
    return make_federation(samples, partition=PARTITION, clients=CLIENTS, seed=seed, unseen=UNSEEN)


def train_demo(method: str, seed: int, changes: dict[str, Any] | None = None, out: Path | None = None) -> Run:
    """Train one of the demo's methods; `changes` replaces some of its hyper-parameters."""
    return fit(
        clients(seed),
        method,
        model="tiny",
        rounds=ROUNDS,
        seed=seed,
        out=out,
        clients_per_round=PER_ROUND,
        eval_every=25,
        device="cpu",
        **SETTINGS[method] | (changes or {}),
    )


def _train(folder: Path, method: str, seed: int, report: Callable[[str], None]) -> Run:
    run = train_demo(method, seed, out=folder / "runs" / f"{method}-{seed}")
    best = run.summary["accuracy"]["best"]
    seen, unseen = (100 * best[group]["per_sample"] for group in ("seen", "unseen"))
    report(f"  {TITLES[method]}, seed {seed}: test accuracy seen {seen:.1f}%, unseen {unseen:.1f}%")
    return run


def _table(runs: dict[str, list[Run]]) -> Table:
    count = len(runs["pefll"])
    table = Table(title=f"Test accuracy, mean ± std over {count} seeds", title_justify="left")
    for column in ("", "seen clients", "unseen clients", "what a new client does"):
        table.add_column(column)
    work = {"local": "trains alone, 200 epochs", "fedavg": "takes the global model", "pefll": "one forward pass"}
    for method, of_method in runs.items():
        cells = []
        for group in ("seen", "unseen"):
            values = [100 * run.summary["accuracy"]["best"][group]["per_sample"] for run in of_method]
            cells.append(mean_std_text(values))
        table.add_row(TITLES[method], *cells, work[method])
    return table


def _personal_model(folder: Path, runs: dict[str, list[Run]], console: Console) -> None:
    """Make a model for an unseen client from its training samples, and test the model on its other samples."""
    run = runs["pefll"][0]
    federation = clients(run.config.seed)
    tests = federation.count[TEST, federation.num_seen :]
    client = federation.num_seen + int(tests.argmax())
    now = federation.indices(client, TRAIN)
    later = torch.cat([federation.indices(client, split) for split in (VALIDATION, TEST)])
    x, y = federation.x.numpy(), federation.y.numpy()
    with sentences_for_disk_errors(str(folder)):
        np.savez(folder / "new_client.npz", x=x[now], y=y[now])
        np.savez(folder / "new_client_later.npz", x=x[later], y=y[later])
    started = time.perf_counter()
    model = run.personalize(x[now], y[now])
    took = time.perf_counter() - started
    path = folder / "new_client.safetensors"
    model.save(path, overwrite=True)
    right = int((model.predict(x[later]) == y[later]).sum())
    say(
        console,
        f"A client that was never seen sent the descriptor of its {len(now)} samples and got {path} in "
        f"{1000 * took:.0f} ms. The model is right on {right} of its {len(later)} later samples.",
    )


def _pictures(folder: Path, runs: dict[str, list[Run]], seeds: int, console: Console) -> None:
    names = [f"{method}-{seed}" for method in ("fedavg", "pefll") for seed in range(seeds)]
    federation = clients(runs["pefll"][0].config.seed)
    try:
        curves([RunFolder(folder / "runs" / name) for name in names], folder / "curves.png")
        descriptor_map(RunFolder(folder / "runs" / "pefll-0"), folder / "descriptors.png")
        federation_picture(federation, folder / "clients.png")
    except PefllError as error:  # matplotlib is an extra
        say(console, f"No pictures: {error}")
        return
    say(console, f"Pictures: {folder}/curves.png, {folder}/descriptors.png, {folder}/clients.png")


def _clear(runs: Path) -> None:
    """Delete the runs of an earlier demo; PefllError if the folder contains anything else."""
    for path in sorted(runs.glob("*")) if runs.is_dir() else []:
        if not RunFolder(path).config_file.is_file():
            raise PefllError(
                f"{path} is not a run of the demo; choose another folder with {argument('folder', option='--out')}",
                code="PEFLL-X005",
            )
        shutil.rmtree(path)
