"""How good the personal models are: sums per client first, then means over samples and over clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pefll.data.federation import SPLITS, Federation
from pefll.engines.cohort import Engine, Ids
from pefll.errors import unknown
from pefll.methods.contract import each, everyone

Floats = npt.NDArray[np.float64]


class Accuracy(NamedTuple):
    """How a group of clients fares, each between 0 and 1.

    Attributes:
        per_sample: right answers over samples of all clients: every sample counts the same.
        per_client: the mean of the clients' accuracies: every client counts the same.
        masked: as per_sample, with classes absent from a client's training labels ruled out.
        worst_tenth: the mean accuracy of the worst tenth of the clients.
        loss: the mean cross-entropy.
    """

    per_sample: float
    per_client: float
    masked: float
    worst_tenth: float
    loss: float


class Evaluation(NamedTuple):
    """Accuracy on clients that took part in training and on those that did not; None for a group with no samples."""

    seen: Accuracy | None
    unseen: Accuracy | None

    def __str__(self) -> str:
        groups = {"seen": self.seen, "unseen": self.unseen}
        return ", ".join(f"{name} {100 * group.per_sample:.1f}%" for name, group in groups.items() if group)


def evaluate(
    engine: Engine,
    method: Any,
    server: Any,
    split: int,
    progress: Callable[[int], None] | None = None,
    most: int = 0,
) -> Evaluation:
    """Personalise a model for every client and score it on the client's own samples.

    Args:
        engine: reaches the clients.
        method: what was trained.
        server: its state.
        split: which samples to score.
        progress: told the number of clients done since it was last called.
        most: at most so many clients of each group, always the same ones; 0 for all.
    """
    seen = _some(np.arange(engine.federation.num_seen), most)
    unseen = _some(np.arange(engine.federation.num_seen, engine.federation.num_clients), most)
    sums = client_scores(engine, method, server, np.concatenate([seen, unseen]), split, progress)
    return Evaluation(summarise(sums[: len(seen)]), summarise(sums[len(seen) :]))


def _some(clients: Ids, most: int) -> Ids:
    """Return at most so many clients, evenly spaced: their order is random already."""
    if most == 0 or len(clients) <= most:
        return clients
    return clients[np.linspace(0, len(clients) - 1, most).astype(np.int64)]


@torch.no_grad()
def client_scores(
    engine: Engine,
    method: Any,
    server: Any,
    clients: Ids,
    split: int,
    progress: Callable[[int], None] | None = None,
) -> Floats:
    """Return samples, correct, masked correct and summed loss of each client, [len(clients), 4]."""
    place = {int(client): row for row, client in enumerate(clients)}
    sums = np.zeros((len(clients), 4))
    for ids, cohort in engine.cohorts(clients):
        theta = method.personalize(server, cohort)
        scores = cohort.run(method.predict, each(theta), split=split)
        rows = [place[int(client)] for client in ids]
        sums[rows] = torch.stack([part.double() for part in scores], dim=1).numpy(force=True)
        if progress is not None:
            progress(len(ids))
    return sums


def summarise(sums: Floats) -> Accuracy | None:
    """Reduce sums per client [clients, 4] to the accuracy of the group."""
    sums = sums[sums[:, 0] > 0]
    if len(sums) == 0:
        return None
    samples, correct, masked, loss = sums.T
    of_client = np.sort(correct / samples)
    worst = max(1, round(len(of_client) / 10))
    total = samples.sum()
    return Accuracy(
        per_sample=float(correct.sum() / total),
        per_client=float(of_client.mean()),
        masked=float(masked.sum() / total),
        worst_tenth=float(of_client[:worst].mean()),
        loss=float(loss.sum() / total),
    )


def split_number(name: str) -> int:
    """Return the number of a split named train, validation (or val), or test."""
    names = {**{split: number for number, split in enumerate(SPLITS)}, "val": 1}
    if name not in names:
        raise unknown("split", name, names)
    return names[name]


def descriptors(engine: Engine, method: Any, server: Any, federation: Federation) -> Floats | None:
    """Return the descriptor of every client from all its training samples, [n, l]; None for methods without."""
    if not hasattr(method, "describe_all"):
        return None
    rows: Floats | None = None
    for ids, cohort in engine.cohorts(np.arange(federation.num_clients)):
        v = cohort.run(method.describe_all, everyone(server.embedder)).double().numpy(force=True)
        if rows is None:
            rows = np.zeros((federation.num_clients, v.shape[1]))
        rows[ids] = v
    return rows
