"""Scores of personal models: sums per client first, then means over samples and over clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.errors import PefllError, unknown
from pefll.data.federation import SPLITS, VALIDATION
from pefll.engines.cohort import Engine, Ids, LimitsWeights, not_finite
from pefll.engines.device_queue import Clock, DeviceFuture, queue_of
from pefll.methods.contract import Method, each
from pefll.runs.config import Config

Floats = npt.NDArray[np.float64]


class Accuracy(NamedTuple):
    """How good the models of a group of clients are.

    Attributes:
        per_sample: the share of correct samples among all clients' samples; every sample counts the same.
        per_client: the mean of the clients' accuracies; every client counts the same.
        masked: like per_sample, but a client's model may not choose classes that its training labels lack.
        worst_tenth: the mean accuracy of the worst tenth of the clients.
        loss: the mean cross-entropy.
    """

    per_sample: float
    per_client: float
    masked: float
    worst_tenth: float
    loss: float


class Evaluation(NamedTuple):
    """The accuracy of seen clients and of unseen clients; None for a group without samples."""

    seen: Accuracy | None
    unseen: Accuracy | None

    def __str__(self) -> str:
        groups = {"seen": self.seen, "unseen": self.unseen}
        return ", ".join(f"{name} {100 * group.per_sample:.1f}%" for name, group in groups.items() if group)


def evaluate(
    engine: Engine,
    method: Method[Any],
    server: Any,
    split: int,
    progress: Callable[[int], None] | None = None,
    share: float = 1.0,
) -> Evaluation:
    """Make a model for every client and return the accuracies on the clients' own samples.

    Args:
        engine: reaches the clients.
        method: the trained method.
        server: the method's state.
        split: the number of the split to score.
        progress: see `client_scores`.
        share: share of the clients of each group to use; always the same clients.
    """
    seen, unseen = _groups(engine, share)
    sums = client_scores(engine, method, server, np.concatenate([seen, unseen]), split, progress)
    return evaluation_of(sums, len(seen))


def evaluation_of(sums: Floats, num_seen: int) -> Evaluation:
    """Return the accuracies of both groups from sums per client [clients, 4], seen clients first."""
    return Evaluation(accuracy_of(sums[:num_seen]), accuracy_of(sums[num_seen:]))


def counts_of(sums: Floats, num_seen: int) -> dict[str, dict[str, list[int]]]:
    """Return each client's numbers of samples, correct samples, and masked correct samples (see `Accuracy`).

    Args:
        sums: [clients, 4], seen clients first.
        num_seen: how many clients are seen.
    """
    groups = {"seen": sums[:num_seen], "unseen": sums[num_seen:]}
    whole = {name: np.rint(group).astype(int) for name, group in groups.items()}  # weight limits make fractions
    columns = ("samples", "correct", "masked")
    return {
        name: {column: group[:, place].tolist() for place, column in enumerate(columns)}
        for name, group in whole.items()
    }


class Evaluator:
    """Scores states during training, always on the same samples of the same clients.

    It prepares everything but the state once, and a GPU records the work once. If new clients must train before they
    have a model, they are left out.

    Args:
        engine: reaches the clients.
        method: the method that is trained.
        split: the number of the split to score.
        share: share of the clients of each group to use.
    """

    def __init__(self, engine: Engine, method: Method[Any], split: int, share: float = 1.0) -> None:
        self._engine = engine
        seen, unseen = _groups(engine, share)
        if method.trains_new_clients:  # too much work for every evaluation
            unseen = unseen[:0]
        self._num_seen, self._clients = len(seen), np.concatenate([seen, unseen])
        cohorts = list(engine.cohorts(self._clients))
        self._order = np.argsort(np.concatenate([ids for ids, _ in cohorts]))
        self._scores = queue_of(engine).repeated(
            lambda server: torch.cat([scores_of(method, server, cohort.anew(), split) for _, cohort in cohorts])
        )

    def begin(self, server: Any) -> DeviceFuture[Evaluation]:
        """Return the evaluation of a state as a future."""
        clock = Clock(self._engine.device)
        return clock.future(self._scores(server), self._read)

    def _read(self, scores: Tensor) -> Evaluation:
        sums = _checked(scores.numpy()[self._order], self._engine, self._clients)
        return evaluation_of(_weighted(self._engine, self._clients, sums, chooses=True), self._num_seen)


def _groups(engine: Engine, share: float) -> tuple[Ids, Ids]:
    """Return a share of the seen and of the unseen clients: evenly spaced, and at least 20 of each, or all."""
    groups = []
    for clients in np.split(np.arange(engine.federation.num_clients), [engine.federation.num_seen]):
        size = min(max(20, math.ceil(share * len(clients))), len(clients))
        # Evenly spaced is random here, because the order of clients is random.
        groups.append(clients[np.linspace(0, len(clients) - 1, size).astype(np.int64)])
    return groups[0], groups[1]


def client_scores(
    engine: Engine,
    method: Method[Any],
    server: Any,
    clients: Ids,
    split: int,
    progress: Callable[[int], None] | None = None,
    as_new: bool = False,
) -> Floats:
    """Return samples, correct, masked correct and summed loss of each client, [len(clients), 4].

    Args:
        engine: reaches the clients.
        method: the trained method.
        server: the method's state.
        clients: the clients' numbers, in ascending order.
        split: the number of the split to score.
        progress: called with the number of clients done since the last call, often 0 if they take long. An error that
            it raises ends the work.
        as_new: whether seen clients are treated as new clients.
    """
    order: list[Ids] = []
    parts: list[Tensor] = []
    for ids, cohort in engine.cohorts(clients, as_new):
        order.append(ids)
        per_client = None
        if progress is not None:
            per_client = cohort.on_progress = _PerClient(progress, len(ids))
        parts.append(scores_of(method, server, cohort, split))
        if per_client is not None:
            per_client.end()
    # Read only here, because reading a number waits for the device.
    sums: Floats = torch.cat(parts).numpy(force=True)[np.argsort(np.concatenate(order))]
    return _weighted(engine, clients, _checked(sums, engine, clients), chooses=False)


class _PerClient:
    """Reports progress per client if possible, else per cohort; see `client_scores`."""

    def __init__(self, progress: Callable[[int], None], clients: int) -> None:
        self._progress, self._left = progress, clients

    def __call__(self, made: bool) -> None:
        step = min(int(made), self._left)
        self._left -= step
        self._progress(step)

    def end(self) -> None:
        """Report the clients that were not reported yet."""
        self._progress(self._left)


@torch.no_grad()
def scores_of(method: Method[Any], server: Any, cohort: Any, split: int) -> Tensor:
    """Return samples, correct, masked correct and summed loss of a cohort's clients, float64 [c, 4]."""
    theta = method.personalize(server, cohort)
    scores = cohort.run(method.predict, each(theta), split=split)
    return torch.stack([part.double() for part in scores], dim=1)


def _weighted(engine: Engine, clients: Ids, sums: Floats, chooses: bool) -> Floats:
    """Return the sums after the engine has limited the weight of each client; see `LimitsWeights`."""
    limited: Floats = engine.weighed(clients, sums, chooses) if isinstance(engine, LimitsWeights) else sums
    return limited


def _checked(values: Floats, engine: Engine, clients: Ids) -> Floats:
    """Return values [clients, ...]; PefllError if a row is not finite, as after a message with NaN."""
    fine = np.isfinite(values).all(axis=1)
    if not fine.all():
        # If every row is bad, the reason is not the data of one client.
        who = engine.federation.name_of(int(clients[int(fine.argmin())])) if fine.any() else None
        raise not_finite("evaluation", who, None)
    return values


def accuracy_of(sums: Floats) -> Accuracy | None:
    """Return the accuracy of a group from sums per client [clients, 4]; None without samples."""
    sums = sums[sums[:, 0] > 0]
    if len(sums) == 0:
        return None
    samples, correct, masked, loss = sums.T
    of_client = np.sort(correct / samples)
    worst = math.ceil(len(of_client) / 10)
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
    if not isinstance(name, str):
        raise PefllError(f"the split is a {type(name).__name__}; give a name, such as 'test'", code="PEFLL-T102")
    if name not in names:
        raise unknown("split", name, names)
    return names[name]


@torch.no_grad()
def descriptors(engine: Engine, method: Method[Any], server: Any) -> Floats | None:
    """Return all clients' descriptors [n, l], each from all training samples; None if the method has none."""
    clients = np.arange(engine.federation.num_clients)
    order: list[Ids] = []
    parts: list[Tensor] = []
    for ids, cohort in engine.cohorts(clients):
        v = method.descriptors(server, cohort)
        if v is None:
            return None
        order.append(ids)
        parts.append(v.double())
    return _checked(torch.cat(parts).numpy(force=True)[np.argsort(np.concatenate(order))], engine, clients)


def evaluated_share(engine: Engine, method: Method[Any], config: Config) -> float:
    """Return the share of clients that evaluations during training use.

    An evaluation uses a quarter as many samples as the rounds since the last evaluation. A sample costs about three
    times as much in training as in an evaluation. So evaluations take 5% to 8% of a run on a CPU, and less on a GPU.
    """
    federation = engine.federation
    if config.eval_clients:
        return config.eval_clients / federation.num_clients
    owned = float(federation.count[: VALIDATION + 1].sum())
    of_client = owned / federation.num_clients
    samples = method.local_epochs * of_client or method.local_steps * float(method.batch_size or of_client)
    trained: float = config.eval_every * engine.clients_per_round * samples
    return min(1.0, 0.25 * trained / owned)
