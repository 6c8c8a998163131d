"""Scores of personal models: sums per client first, then means over samples and over clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.errors import PefllError, unknown
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS, VALIDATION
from pefll.engines.cohort import Engine, Ids, LimitsWeights, not_finite
from pefll.engines.device_queue import Clock, DeviceFuture, queue_of
from pefll.methods.contract import Method, each
from pefll.runs.config import Config
from pefll.runs.record import is_share
from pefll.tasks import Score, Task
from pefll.tasks.checking import own_loss_of
from pefll.tasks.sums import (
    Layout,
    check_bounds,
    check_same_names,
    figures_of,
    layout_of,
    metric_not_finite,
    rows_of,
    shares_of,
)
from pefll.training.figures import Accuracy, Evaluation, figures_type

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """Makes metrics from the sums of a task.

    Attributes:
        task: the task.
        layout: how its sums lie in a row.
    """

    task: Task
    layout: Layout

    @classmethod
    def of(cls, method: Method[Any], federation: Federation) -> Measure:
        """Return the measure for a method and the clients of a federation."""
        task = method.problem.task
        return cls(task, layout_of(task, federation.y, federation.classes))

    @property
    def classifies(self) -> bool:
        """Whether the first sums are those of a `Score`."""
        return bool(self.layout.kind._fields[:4] == Score._fields)

    def evaluation(self, sums: Floats, num_seen: int) -> Evaluation:
        """Return the metrics of both groups from sums per client [clients, width], seen clients first."""
        return Evaluation(self.group(sums[:num_seen]), self.group(sums[num_seen:]))

    def client(self, row: Floats) -> dict[str, float]:
        """Return the metrics of one client from its sums [width]; NaN without samples."""
        if row[0] > 0:
            return self._figures(row)
        return dict.fromkeys(self._figure_names, math.nan)

    @cached_property
    def _figure_names(self) -> tuple[str, ...]:
        """The names of the task's metrics."""
        return tuple(figures_of(self.task, self.layout.sums(np.ones(self.layout.width))))

    def _figures(self, row: Floats) -> dict[str, float]:
        """Return the task's metrics of sums [width]."""
        figures = figures_of(self.task, self.layout.sums(row))
        check_same_names(self.task, figures, self._figure_names)
        return figures

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics of a group."""
        names: tuple[str, ...] = self.group(np.ones((1, self.layout.width)))._fields
        return names

    @property
    def errors(self) -> tuple[str, ...]:
        """The names of those metrics that are better when smaller."""
        errors: tuple[str, ...] = self.group(np.ones((1, self.layout.width))).errors
        return errors

    @property
    def shares(self) -> tuple[str, ...]:
        """The names of those metrics that are shown in per cent."""
        names, own = self.names, shares_of(self.task)
        return tuple(name for name in names if is_share(name, names[0], own))

    def group(self, sums: Floats) -> Any:
        """Return the metrics of a group of clients from sums [clients, width]; None without samples."""
        sums = sums[sums[:, 0] > 0]
        if len(sums) == 0:
            return None
        if self.layout.kind is Score:
            return accuracy_of(sums)
        pooled = self._figures(sums.sum(axis=0))
        if self.classifies:
            accuracy = accuracy_of(sums[:, :4])
            assert accuracy is not None
            more = {name: value for name, value in pooled.items() if name not in ("accuracy", "masked", "loss")}
            found: dict[str, float] = {**accuracy._asdict(), **more}
            return figures_type(tuple(found), self.task.errors, shares_of(self.task))(**found)
        first, *others = pooled
        smaller = first in self.task.errors
        each = np.array([self.client(row)[first] for row in sums])
        known = np.sort(each[~np.isnan(each)])[:: -1 if smaller else 1]  # the worst ones first
        worst = known[: math.ceil(len(known) / 10)]
        found = {
            first: pooled[first],
            "per_client": float(known.mean()) if len(known) else math.nan,
            "worst_tenth": float(worst.mean()) if len(known) else math.nan,
            **{name: pooled[name] for name in others},
        }
        errors = (*self.task.errors, *(("per_client", "worst_tenth") if smaller else ()))
        return figures_type(tuple(found), errors, shares_of(self.task))(**found)

    def of_clients(self, sums: Floats, num_seen: int) -> dict[str, Any]:
        """Return the entry of a summary with the figures of single clients; see `counts_of`."""
        if self.classifies:
            return {"client_counts": counts_of(sums, num_seen)}
        groups = {"seen": sums[:num_seen], "unseen": sums[num_seen:]}
        found: dict[str, dict[str, list[Any]]] = {}
        for name, group in groups.items():
            rows = [self.client(row) for row in group]
            found[name] = {"samples": np.rint(group[:, 0]).astype(int).tolist()}
            for metric in rows[0] if rows else ():
                found[name][metric] = [None if math.isnan(row[metric]) else float(f"{row[metric]:.6g}") for row in rows]
        return {"client_metrics": found}


def evaluate(
    engine: Engine,
    method: Method[Any],
    server: Any,
    split: int,
    progress: Callable[[int], None] | None = None,
    share: float = 1.0,
) -> Evaluation:
    """Make a model for every client and return the metrics on the clients' own samples.

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
    return Measure.of(method, engine.federation).evaluation(sums, len(seen))


def counts_of(sums: Floats, num_seen: int) -> dict[str, dict[str, list[int]]]:
    """Return each client's numbers of samples, correct samples, and masked correct samples (see `Accuracy`).

    Args:
        sums: [clients, 4 or more], seen clients first.
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
        self._engine, self._measure = engine, Measure.of(method, engine.federation)
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
        sums = _checked_sums(scores.numpy()[self._order], self._engine, self._clients, self._measure.layout)
        return self._measure.evaluation(_weighted(self._engine, self._clients, sums, chooses=True), self._num_seen)


def why_not_evaluated(method: Method[Any], federation: Federation, group: str) -> str:
    """Return why a group of clients, seen or unseen, is not evaluated during training; "" if it is evaluated."""
    unseen, seen = group == "unseen", federation.num_seen
    counts = federation.count[VALIDATION, seen:] if unseen else federation.count[VALIDATION, :seen]
    if not len(counts):
        return "there are none"
    if unseen and method.trains_new_clients:
        return "this method trains new clients before they have a model"
    return "" if bool(counts.any()) else "none of them has validation samples"


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
    """Return the task's sums of each client, [len(clients), width]; in classification, the four of a `Score`.

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
    layout = Measure.of(method, engine.federation).layout
    return _weighted(engine, clients, _checked_sums(sums, engine, clients, layout), chooses=False)


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
    """Return the task's sums of a cohort's clients, float64 [c, width]; the first one is the number of samples."""
    theta = method.personalize(server, cohort)
    scores = cohort.run(method.predict, each(theta), split=split)
    return rows_of(scores)


def _weighted(engine: Engine, clients: Ids, sums: Floats, chooses: bool) -> Floats:
    """Return the sums after the engine has limited the weight of each client; see `LimitsWeights`."""
    limited: Floats = engine.weighed(clients, sums, chooses) if isinstance(engine, LimitsWeights) else sums
    return limited


def _checked(values: Floats, engine: Engine, clients: Ids) -> Floats:
    """Return values [clients, ...]; PefllError if a row is not finite, as after a message with NaN."""
    fine = np.isfinite(values).all(axis=1)
    if not fine.all():
        _check_metrics(values[int(fine.argmin())], engine, int(clients[int(fine.argmin())]))
        # If every row is bad, the reason is not the data of one client.
        who = engine.federation.name_of(int(clients[int(fine.argmin())])) if fine.any() else None
        raise not_finite("evaluation", who, None, own_loss_of(engine.method.problem.task))
    return values


def _checked_sums(sums: Floats, engine: Engine, clients: Ids, layout: Layout) -> Floats:
    """Return sums [clients, width]; PefllError if some are not finite, or outside of the bounds of a metric."""
    task, name_of = engine.method.problem.task, engine.federation.name_of
    _checked(sums, engine, clients)
    if layout.kind is not Score:  # whose sums cannot be out of bounds
        check_bounds(task, layout, sums, lambda row: f"client {name_of(int(clients[row]))}")
    return sums


def _check_metrics(row: Floats, engine: Engine, client: int) -> None:
    """Raise PefllError if only later sums of a client are not finite: its outputs are fine, but a metric is not."""
    layout = layout_of(engine.method.problem.task, engine.federation.y, engine.federation.classes)
    if len(row) != layout.width:
        return
    sums = layout.sums(row)
    # The loss is not finite if the outputs are not. A task may have no sum of its loss; then all sums decide.
    judged = [sums.loss] if "loss" in sums._fields else list(sums[1:])
    if any(np.isfinite(part).all() for part in judged):
        raise metric_not_finite(layout, row, f"a sample of client {engine.federation.name_of(client)}")


def accuracy_of(sums: Floats) -> Accuracy | None:
    """Return the accuracy of a group from sums per client [clients, 4]; None without samples."""
    sums = sums[sums[:, 0] > 0]
    if len(sums) == 0:
        return None
    samples, correct, masked, loss = sums.T[:4]
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
