"""Measures what a server can learn about its clients, and how much malicious clients can harm all models.

It attacks the server and clients of this package, on scikit-learn's digits, with Flower's messages in one process:

    python -m benchmarks.curious_server --out results/privacy.json

The attacks `descriptor` and `update` ask for one sample at a time. `patient` obeys every limit of a client, and
computes single samples from many rounds. `histogram` and `prior` only read what an honest run sends. In `sign_flip` the
attackers are clients.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from pefll.core import randomness
from pefll.core.files import write_json
from pefll.data import TEST, TRAIN, Federation, load_samples, make_federation
from pefll.deploy import server_app
from pefll.deploy.demo import SETTINGS, agreement_of
from pefll.deploy.plan import Plan
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.inprocess import InProcessGrid, write_client
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import header_of, pack, tensors_of
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.flower.server.request import RoundCache
from pefll.engines.flower.server.terms import Dropped
from pefll.methods.contract import Each, Everyone, each, everyone
from pefll.training.evaluation import accuracy_of, client_scores
from pefll.training.summary import commit

COMMAND = "python -m benchmarks.curious_server --out results/privacy.json"
ALLOW_ALL = {"min-samples": "0", "numbers-per-sample": "0"}  # a client without limits
PIXELS, CLASSES, SHIFT = 64, 10, 8.0
Step = Callable[[], None]


@dataclass
class World:
    """A federation of digits, the grid that connects its clients, and the server's log."""

    federation: Federation
    agreement: Agreement
    grid: InProcessGrid
    engine: FlowerEngine
    log: list[str]

    def ask(self, task: Callable[..., Any], client: int, t: int, argument: Everyone | Each) -> Tensor | None:
        """Ask one client to run a task in a round; return its reply [...], or None if it refuses."""
        try:
            reply: Tensor = self.engine._cohort([client], t, RoundCache(f"{t:x}")).run(task, argument)
        except Dropped as refused:
            self.log += refused.faults.values()
            return None
        return reply[0]

    def training_samples(self, client: int) -> set[bytes]:
        """Return a client's training samples; each is its pixels and its label, as bytes."""
        rows = self.federation.indices(client, TRAIN)
        return {as_bytes(self.federation.x[row], int(self.federation.y[row])) for row in rows}


def world(folder: Path, clients: int, limits: dict[str, str], method: str = "pefll", **settings: object) -> World:
    """Return a federation of digits; each client has its own file and its own limits."""
    samples = load_samples("digits", Path("."))
    federation = make_federation(samples, partition="dirichlet 0.3", clients=clients, seed=0, unseen=0.0)
    # The label prior has PeFLL's learning rates, because `agreement_of` has no others for it.
    settings = settings if method == "pefll" else SETTINGS | settings
    agreed = agreement_of(federation, method, **settings)  # type: ignore[arg-type]
    names = [client_name(number) for number in range(clients)]
    nodes = {}
    for number, name in enumerate(names):
        write_client(federation, number, folder / f"{name}.npz")
        nodes[number + 1] = {"name": name, "data": str(folder / f"{name}.npz"), "methods": method, **limits}
    grid = InProcessGrid(PefllClientApp(), nodes, agreed.to_config())
    log: list[str] = []
    engine = FlowerEngine(grid, agreed, names, clients, report=log.append)
    engine.roster.present()
    return World(federation, agreed, grid, engine, log)


def as_bytes(pixels: Tensor, label: int) -> bytes:
    """Return a sample as bytes: its pixels, uint8 [64], and its label."""
    return pixels.to(torch.uint8).flatten().numpy().tobytes() + bytes([label])


def as_pixels(agreed: Agreement, x: Tensor) -> Tensor:
    """Return the original pixels 0..255 of normalised inputs [..., 64]."""
    assert agreed.normalise is not None
    (mean,), (std,) = agreed.normalise
    return (255 * (x * std + mean)).round().clamp(0, 255)


def window(method: Any, first: int) -> Tensor:
    """Return η_v of an MLP embedding whose output is coordinates first, first + 1, ... of (pixels, one-hot label)."""
    size, (inward, inward_bias, outward, outward_bias) = method.descriptor, map(torch.zeros, method.phi.shapes)
    for place in range(min(size, PIXELS + CLASSES - first)):
        inward[place, first + place] = outward[place, place] = 1.0
        inward_bias[place] = SHIFT  # keeps all values positive, so that ReLU changes none
        outward_bias[place] = -SHIFT
    return method.phi.flatten([inward, inward_bias, outward, outward_bias])  # type: ignore[no-any-return]


def descriptor(folder: Path, replies: int, limits: dict[str, str], step: Step) -> dict[str, Any]:
    """Get a sample from each descriptor: a batch of one sample, and an identity as the embedding network."""
    here = world(folder, 8, limits, embedding="mlp", descriptor_size=PIXELS + CLASSES, descriptor_batch=1)
    method: Any = here.engine.method
    exact = 0
    for number in range(replies):
        client = number % 8
        v = here.ask(method.describe, client, number // 8, everyone(window(method, 0)))
        if v is not None:
            found = as_bytes(as_pixels(here.agreement, v[:PIXELS]), int(v[PIXELS:].argmax()))
            exact += found in here.training_samples(client)
        step()
    return _counted(here, replies, exact)


def update(folder: Path, replies: int, limits: dict[str, str], step: Step) -> dict[str, Any]:
    """Get a sample from each change Δθ: with a batch of one, the first layer's gradient is a multiple of the sample."""
    here = world(folder, 8, limits, local_steps=1, batch_size=1, lambda_theta=0.0, client_clip=0.0)
    method: Any = here.engine.method
    network = method.problem.model
    exact = 0
    for number in range(replies):
        client, theta = number % 8, network.init(number, "attack")
        parts = network.unflatten(theta.clone())
        for name, part in parts.items():
            if name == "layers.0.bias":
                part.fill_(SHIFT)  # keeps all units positive, so that ReLU changes none
        theta = network.flatten(list(parts.values()))
        delta = here.ask(method.adapt, client, number // 8, each(theta[None]))
        if delta is not None:
            of = network.unflatten(delta)
            unit = int(of["layers.0.bias"].abs().argmax())
            x = of["layers.0.weight"][unit] / of["layers.0.bias"][unit]
            # With softmax and cross-entropy, only the true class has a negative gradient.
            found = as_bytes(as_pixels(here.agreement, x), int(of["layers.1.bias"].argmin()))
            exact += found in here.training_samples(client)
        step()
    return _counted(here, replies, exact)


def _counted(here: World, replies: int, exact: int) -> dict[str, Any]:
    here.engine.close()
    refused = [line for line in here.log if "refuses" in line]
    return {"asked": replies, "exact_samples": exact, "refused": len(refused), "refusal": refused[0] if refused else ""}


def patient(folder: Path, rounds: int, clients: int, step: Step) -> dict[str, Any]:
    """Within a client's limits, compute single samples from means over 32 samples; the server knows which were drawn.

    For a window of 32 coordinates, η_v is the same in all rounds. So each round is one equation for each coordinate.
    """
    here = world(folder, 8, {}, embedding="mlp", descriptor_size=32)
    method: Any = here.engine.method
    exact = samples = refused = 0
    for client in range(clients):
        count = int(here.federation.count[TRAIN, client])
        shares = np.zeros((rounds, count))
        for t in range(rounds):
            shares[t, drawn(here, client, t).numpy()] = 1 / 32
        found = []
        for first in range(0, PIXELS + CLASSES, 32):
            means = []
            for t in range(rounds):
                v = here.ask(method.describe, client, t, everyone(window(method, first)))
                refused += v is None
                means.append(torch.zeros(32) if v is None else v)
                step()
            found.append(np.linalg.lstsq(shares, torch.stack(means).double().numpy(), rcond=None)[0])
        solved = torch.from_numpy(np.concatenate(found, axis=1)[:, : PIXELS + CLASSES])
        pixels, labels = as_pixels(here.agreement, solved[:, :PIXELS]), solved[:, PIXELS:].argmax(dim=1)
        truth = here.training_samples(client)
        exact += sum(as_bytes(x, int(y)) in truth for x, y in zip(pixels, labels, strict=True))
        samples += count
    here.engine.close()
    return {"clients": clients, "rounds": rounds, "samples": samples, "exact_samples": exact, "refused": refused}


def histogram(folder: Path, rounds: int, clients: int, step: Step) -> dict[str, Any]:
    """Get label histograms p from an honest run with the linear embedding v = W p + b; the server knows W and b."""
    here = world(folder, clients, {}, embedding="linear")
    seen: dict[str, list[tuple[int, int, Tensor, Tensor]]] = {"describe": [], "describe_all": []}

    def reading(node: int, request: Message, deliver: Callable[[Message], Message]) -> list[Message]:
        reply = deliver(request)
        task = request.metadata.message_type.partition(".")[2]
        if task in seen and "refusal" not in header_of(reply.content):
            (eta_v,), (v,) = tensors_of(request.content).values(), tensors_of(reply.content).values()
            seen[task].append((node - 1, header_of(request.content)["round"], eta_v.clone(), v.clone()))
        if task == "describe":
            step()
        return [reply]

    here.grid.transport = reading
    method: Any = here.engine.method
    here.engine.close()
    names = tuple(client_name(number) for number in range(clients))
    server_app.train(here.grid, Plan(here.agreement, names, rounds=rounds, eval_every=rounds))
    truth = here.federation.histograms()
    exact = dict.fromkeys(range(clients), False)
    for number, _, eta_v, v in seen["describe_all"]:
        exact[number] = bool((solved_counts(method, eta_v, v, int(truth[number].sum())) == truth[number]).all())
    batches = [_batch_is_exact(here, method, *reply) for reply in seen["describe"]]
    return {
        "descriptor_size": method.descriptor,
        "clients": clients,
        "rounds": rounds,
        "clients_with_exact_histogram": sum(exact.values()),
        "training_batches": len(batches),
        "training_batches_with_exact_histogram": sum(batches),
    }


def solved_counts(method: Any, eta_v: Tensor, v: Tensor, samples: int) -> np.ndarray[Any, Any]:
    """Solve v = W p + b for the counts of each class among some samples, [10]."""
    parts = method.phi.unflatten(eta_v.double())
    weight, bias = parts["linear.weight"], parts["linear.bias"]
    p = torch.linalg.lstsq(weight, (v.double() - bias)[:, None]).solution[:, 0]
    counts: np.ndarray[Any, Any] = np.rint(samples * p.numpy()).astype(np.int64)
    return counts


def _batch_is_exact(here: World, method: Any, client: int, t: int, eta_v: Tensor, v: Tensor) -> bool:
    rows = here.federation.indices(client, TRAIN)[drawn(here, client, t)]
    truth = np.bincount(here.federation.y[rows].numpy(), minlength=CLASSES)
    return bool((solved_counts(method, eta_v, v, len(rows)) == truth).all())


def drawn(here: World, client: int, t: int) -> Tensor:
    """Return which of a client's training samples a round's descriptor is computed from; the server knows this, too."""
    count = here.federation.count[TRAIN, client]
    key = randomness.key(here.agreement.seed, "descriptor", torch.tensor(t), torch.tensor(client))
    return randomness.choose(randomness.spread(key, 1), count, min(32, int(count))).flatten()


def prior(folder: Path, clients: int, step: Step) -> dict[str, Any]:
    """Read label histograms in a run of pefll-prior: the last numbers of a descriptor are the class shares."""
    here = world(folder, clients, {}, "pefll-prior")
    method: Any = here.engine.method
    truth = here.federation.histograms()
    exact = 0
    for client in range(clients):
        v = here.ask(method.describe, client, 0, everyone(method.phi.init(0, "embedder")))
        told = np.zeros(CLASSES) if v is None else v[method.descriptor :].double().numpy()
        exact += bool((np.rint(truth[client].sum() * told) == truth[client]).all())
        step()
    here.engine.close()
    return {"clients": clients, "clients_with_exact_histogram": exact}


def sign_flip(folder: Path, factor: float, clients: int, rounds: int, step: Step) -> dict[str, Any]:
    """Return the final accuracy of honest clients, if every fifth client sends `factor` times its Δθ."""
    here = world(folder, clients, {})
    liars = {number for number in range(clients) if number % 5 == 4} if factor != 1 else set()

    def lying(node: int, request: Message, deliver: Callable[[Message], Message]) -> list[Message]:
        reply = deliver(request)
        if node - 1 in liars and request.metadata.message_type == "train.adapt":
            tensors = {name: factor * leaf for name, leaf in tensors_of(reply.content).items()}
            return [Message(pack(header_of(reply.content), tensors), reply_to=request)]
        return [reply]

    here.grid.transport = lying
    engine = here.engine
    state = engine.start()
    for t in range(rounds):
        state = engine.advance(state, t, 1)
        step()
    here.grid.transport = lambda node, request, deliver: [deliver(request)]
    honest = np.array([number for number in range(clients) if number % 5 != 4])
    result = accuracy_of(client_scores(engine, engine.method, state, honest, TEST))
    engine.close()
    assert result is not None
    return {
        "factor": factor,
        "clients": clients,
        "attackers": len(liars),
        "rounds": rounds,
        "accuracy": round(result.per_sample, 4),
        "lines_in_the_log": len(here.log),
        "of_them_on_attackers": sum(any(client_name(number) in line for number in liars) for line in here.log),
        "first_line": here.log[0] if here.log else "",
    }


Attack = Callable[..., dict[str, Any]]


def attacks(scale: float) -> list[tuple[str, int, Attack]]:
    """Return the name of each attack, its number of steps, and its function; `scale` makes all attacks shorter."""
    replies, rounds, equations, victims = round(240 * scale), round(100 * scale), 250, max(1, round(8 * scale))
    flips = {"honest": 1.0, "sign_flip": -1.0, "sign_flip_times_ten": -10.0}
    return [
        ("descriptor", replies, partial(descriptor, replies=replies, limits=ALLOW_ALL)),
        ("descriptor_refused", replies, partial(descriptor, replies=replies, limits={})),
        ("update", replies, partial(update, replies=replies, limits=ALLOW_ALL)),
        ("update_refused", replies, partial(update, replies=replies, limits={})),
        ("patient", 3 * equations * victims, partial(patient, rounds=equations, clients=victims)),
        ("histogram", 2 * rounds, partial(histogram, rounds=rounds, clients=40)),
        ("prior", 40, partial(prior, clients=40)),
        *((n, rounds, partial(sign_flip, factor=by, clients=20, rounds=rounds)) for n, by in flips.items()),
    ]


def main() -> None:
    """Run all attacks and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--scale", type=float, default=1.0, help="a share of all replies and rounds")
    chosen = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # clients log every refusal
    figures: dict[str, Any] = {}
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        for name, steps, attack in attacks(chosen.scale):
            bar = bars.add_task(name, total=steps)
            with tempfile.TemporaryDirectory() as folder:
                figures[name] = attack(Path(folder), step=partial(bars.advance, bar))
            bars.update(bar, completed=steps)
            bars.console.print(f"{name}: {figures[name]}", soft_wrap=True)
    if chosen.out:
        made = {"command": COMMAND, "commit": commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(chosen.out, made | {"scale": chosen.scale, "attacks": figures})


if __name__ == "__main__":
    main()
