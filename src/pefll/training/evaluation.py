"""How good the personal models are: sums per client first, then means over samples and over clients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.backend.flops import FlopCounter
from pefll.core.arguments import whole_number
from pefll.core.errors import PefllError, unknown
from pefll.core.tree import Tree, map_tree
from pefll.data.federation import SPLITS, VALIDATION, Federation, check_is_federation
from pefll.engines.cohort import BaseCohort, Engine, Ids, LimitsWeights, not_finite
from pefll.engines.device_queue import Clock, DeviceFuture, queue_of
from pefll.engines.serial import SerialEngine
from pefll.methods.contract import Each, Everyone, Method, Own, each
from pefll.runs.config import Config

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
    method: Method[Any],
    server: Any,
    split: int,
    progress: Callable[[int], None] | None = None,
    share: float = 1.0,
) -> Evaluation:
    """Personalise a model for every client and score it on the client's own samples.

    Args:
        engine: reaches the clients.
        method: what was trained.
        server: its state.
        split: which samples to score.
        progress: told the number of clients done since it was last called.
        share: of each group's clients, always the same ones.
    """
    seen, unseen = _groups(engine, share)
    sums = client_scores(engine, method, server, np.concatenate([seen, unseen]), split, progress)
    return evaluation_of(sums, len(seen))


def evaluation_of(sums: Floats, num_seen: int) -> Evaluation:
    """Reduce sums per client [clients, 4], those of seen clients first, to the accuracies of the two groups."""
    return Evaluation(accuracy_of(sums[:num_seen]), accuracy_of(sums[num_seen:]))


def counts_of(sums: Floats, num_seen: int) -> dict[str, dict[str, list[int]]]:
    """Return each client's samples, right answers, and right answers with absent classes ruled out.

    They are whole numbers, from sums [clients, 4].
    """
    groups = {"seen": sums[:num_seen], "unseen": sums[num_seen:]}
    whole = {name: np.rint(group).astype(int) for name, group in groups.items()}  # a limited weight may have fractions
    columns = ("samples", "correct", "masked")
    return {
        name: {column: group[:, place].tolist() for place, column in enumerate(columns)}
        for name, group in whole.items()
    }


class Evaluator:
    """Scores states on the same samples of the same clients while training goes on.

    What an evaluation needs besides the state is made once, and a GPU records its work once. Nothing waits for a
    result until somebody asks for it. New clients that would have to train first take no part.

    Args:
        engine: reaches the clients.
        method: what is trained.
        split: which samples to score.
        share: of each group's clients.
    """

    def __init__(self, engine: Engine, method: Method[Any], split: int, share: float = 1.0) -> None:
        self._engine = engine
        seen, unseen = _groups(engine, share)
        if method.trains_new_clients:  # too much work to be done again and again
            unseen = unseen[:0]
        self._seen = len(seen)
        clients = self._clients = np.concatenate([seen, unseen])
        cohorts = list(engine.cohorts(clients))
        # The place of each client, in the order in which the engine takes them, among the clients.
        self._place = _places(engine, clients)[np.concatenate([ids for ids, _ in cohorts])]
        self._scores = queue_of(engine).repeated(
            lambda server: torch.cat([scores_of(method, server, cohort.anew(), split) for _, cohort in cohorts])
        )

    def begin(self, server: Any) -> DeviceFuture[Evaluation]:
        """Score a state; the result is there later."""
        clock = Clock(self._engine.device)
        return clock.future(self._scores(server), self._read)

    def _read(self, scores: Tensor) -> Evaluation:
        sums = np.zeros((len(self._place), 4))
        sums[self._place] = scores.numpy()
        _check_finite(sums, self._engine, self._clients)
        sums = _weighed(self._engine, self._clients, sums, chooses=True)
        return Evaluation(accuracy_of(sums[: self._seen]), accuracy_of(sums[self._seen :]))


def _groups(engine: Engine, share: float) -> tuple[Ids, Ids]:
    """Return a share of the seen clients and of the unseen ones."""
    seen, all_ = engine.federation.num_seen, engine.federation.num_clients
    return _some(np.arange(seen), share), _some(np.arange(seen, all_), share)


def _some(clients: Ids, share: float) -> Ids:
    """Return a share of the clients, evenly spaced, but not fewer than 20: their order is random already."""
    most = max(20, math.ceil(share * len(clients)))
    if most >= len(clients):
        return clients
    return clients[np.linspace(0, len(clients) - 1, most).astype(np.int64)]


def _places(engine: Engine, clients: Ids) -> Ids:
    """Return, for each client of the federation, where it stands in `clients`; 0 for those that do not."""
    places = np.zeros(engine.federation.num_clients, dtype=np.int64)
    places[clients] = np.arange(len(clients))
    return places


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
        method: what was trained.
        server: its state.
        clients: which ones.
        split: which samples to score.
        progress: told the number of clients done since it was last called; often 0, where they take long. Whatever it
            raises ends the work.
        as_new: whether all of them come as if they had not taken part.
    """
    order: list[Ids] = []
    parts: list[Tensor] = []
    for ids, cohort in engine.cohorts(clients, as_new):
        order.append(ids)
        told = None
        if progress is not None:
            told = cohort.on_progress = _PerClient(progress, len(ids))
        parts.append(scores_of(method, server, cohort, split))
        if told is not None:
            told.end()
    sums = np.zeros((len(clients), 4))
    # Gathered at the end: the first look at a number would wait for the device.
    sums[_places(engine, clients)[np.concatenate(order)]] = torch.cat(parts).numpy(force=True)
    _check_finite(sums, engine, clients)
    return _weighed(engine, clients, sums, chooses=False)


class _PerClient:
    """Reports progress per client if possible, else per cohort.

    Args:
        progress: see `client_scores`.
        clients: how many.
    """

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
    """Return samples, correct, masked correct and summed loss of the clients of a cohort, float64 [c, 4]."""
    theta = method.personalize(server, cohort)
    scores = cohort.run(method.predict, each(theta), split=split)
    return torch.stack([part.double() for part in scores], dim=1)


def _weighed(engine: Engine, clients: Ids, sums: Floats, chooses: bool) -> Floats:
    """Return clients' sums with the weights that they have in means; see `LimitsWeights`."""
    limited: Floats = engine.weighed(clients, sums, chooses) if isinstance(engine, LimitsWeights) else sums
    return limited


def _check_finite(values: Floats, engine: Engine, clients: Ids) -> None:
    """Raise PefllError where a row is not finite, as a client's is when anything it was sent was not.

    Args:
        values: [clients, ...].
        engine: knows the clients' names.
        clients: whose rows they are.
    """
    fine = np.isfinite(values).all(axis=1)
    if not fine.all():
        # Where everybody's is bad, nobody's own data is the reason.
        who = engine.federation.name_of(int(clients[int(fine.argmin())])) if fine.any() else None
        raise not_finite("evaluation", who, None)


def accuracy_of(sums: Floats) -> Accuracy | None:
    """Reduce sums per client [clients, 4] to the accuracy of the group."""
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
        raise PefllError(f"a split has a name, such as 'test', and is not a {type(name).__name__}", code="PEFLL-T102")
    if name not in names:
        raise unknown("split", name, names)
    return names[name]


@torch.no_grad()
def descriptors(engine: Engine, method: Method[Any], server: Any) -> Floats | None:
    """Return the descriptor of every client from all its training samples, [n, l]; None for methods without."""
    parts: list[tuple[Ids, Tensor]] = []
    for ids, cohort in engine.cohorts(np.arange(engine.federation.num_clients)):
        v = method.descriptors(server, cohort)
        if v is None:
            return None
        parts.append((ids, v.double()))
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    found: Floats = torch.cat([v for _, v in parts]).numpy(force=True)[order]
    _check_finite(found, engine, np.arange(engine.federation.num_clients))
    return found


class Cost(NamedTuple):
    """What it takes until a new client has its model, with all its work and all that crosses its network.

    Attributes:
        exchanges: messages down to the client, most of them answered.
        bytes_down: sent to the client.
        bytes_up: sent by the client.
        flops: floating point operations of convolutions and matrix products on the client.
        seconds: of everything, server included, on one core of this machine.
    """

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float


def cost_of_new_client(federation: Federation, method: Method[Any], server: Any, client: int, seed: int = 0) -> Cost:
    """Personalise one client that never took part in training, and return what that cost.

    A model that the client made itself is not sent; any other comes down at the end, as one more message. How much
    it costs to use the model is not counted.

    Args:
        federation: has the client.
        method: what was trained.
        server: its state, on any device.
        client: its number, `federation.num_seen` or higher.
        seed: of the run.
    """
    check_is_federation(federation)
    client, seed = whole_number(client, "client", 0), whole_number(seed, "seed", 0)
    if not federation.num_seen <= client < federation.num_clients:
        raise PefllError(
            f"client {client} is not one of the new ones, {federation.num_seen} and higher", code="PEFLL-T103"
        )
    engine = SerialEngine(federation.to(torch.device("cpu")), method, seed, 0)
    state = map_tree(engine.cast, server)
    try:
        ((_, cohort),) = engine.cohorts(np.array([client]))
        weighed = _Weighed(cohort.anew())
        with torch.no_grad():
            _personalise(method, state, weighed)  # before the clock starts: a first call is always slow
            began = time.perf_counter()
            personal = _personalise(method, state, cohort)
            seconds = time.perf_counter() - began
    finally:
        engine.close()
    delivery = 0 if personal is None else cohort.bytes_to_send(each(personal))
    spent = cohort.ledger
    return Cost(spent.exchanges + (delivery > 0), spent.down + delivery, spent.up, weighed.flops, seconds)


def _personalise(method: Method[Any], server: Any, cohort: Any) -> Tree | None:
    """Make the model of one client; return it, or None where the method has brought it to the client itself."""
    personal = method.personalize(server, cohort)
    make = getattr(method, "personal_module", None)
    if make is None:
        return personal
    make(cohort, personal)
    return None


class _Weighed:
    """A cohort that also counts the floating point operations of what its clients do."""

    def __init__(self, cohort: BaseCohort) -> None:
        self._cohort = cohort
        self.size, self.ids, self.is_new = cohort.size, cohort.ids, cohort.is_new
        self.keep = cohort.keep
        self.flops = 0

    def run(self, task: Callable[..., Tree], *arguments: Everyone | Each | Own, **static: int) -> Tree:
        with FlopCounter() as counter:
            replies = self._cohort.run(task, *arguments, **static)
        self.flops += int(counter.get_total_flops())
        return replies


def evaluated_share(engine: Engine, method: Method[Any], config: Config) -> float:
    """Return the share of clients that evaluations during training use.

    Evaluating a sample costs a forward pass, and training on one about three times that; so a quarter as many samples
    as are trained on between two evaluations cost some 5% to 8% on a CPU, and less on a GPU.
    """
    federation = engine.federation
    if config.eval_clients:
        return config.eval_clients / federation.num_clients
    owned = float(federation.count[: VALIDATION + 1].sum())
    of_client = owned / federation.num_clients
    samples = method.local_epochs * of_client or method.local_steps * float(method.batch_size or of_client)
    trained: float = config.eval_every * engine.clients_per_round * samples
    return min(1.0, 0.25 * trained / owned)
