"""The vector engine: it computes all clients of a round at once, as one leading axis. For GPUs see `cuda_queue`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.tree import Tree, map_tree
from pefll.data.client import Client
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN
from pefll.engines.cohort import (
    BaseCohort,
    Ids,
    Ledger,
    check_cohort_size,
    finite_requests,
    finite_rows,
    first_to_blame,
    not_finite,
    sample_cohort,
    seen_and_new,
)
from pefll.engines.cuda_queue import CudaQueue, one_thread
from pefll.engines.device_queue import NO_INPUTS, RoundInputs
from pefll.engines.mapping import check_embedding_mapped, check_mapped, explain_unmappable
from pefll.engines.round_plan import CONSTANT, UNIFORM, Rates, RoundPlan
from pefll.engines.settings import EngineSettings
from pefll.methods.contract import Each, Everyone, Method, Problem
from pefll.tasks.checking import own_loss_of

# Evaluation maps several clients at once. Together they have about this many samples (with padding) and parameters.
SAMPLES_AT_ONCE = {"cuda": 1 << 16, "cpu": 1 << 12}
PARAMETERS_AT_ONCE = 1 << 28
CLIENTS_AT_ONCE = 65_535  # the limit of a CUDA grid's second axis


@dataclass(eq=False, kw_only=True)
class VectorCohort(BaseCohort):
    """A cohort that runs a task for one client on all clients at once, with `torch.vmap`."""

    federation: Federation
    problem: Problem
    seed: int
    dtype: torch.dtype
    round: Tensor
    capacity: tuple[int, int, int]
    trains: bool = False  # whether this is a training round; its replies are checked
    finite: list[Tensor] = field(default_factory=list)  # per exchange: which replies are finite, bool [size]
    requests_finite: list[Tensor] = field(default_factory=list)  # per exchange: which clients got only finite numbers

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        def one(id_: Tensor, offset: Tensor, count: Tensor, *values: Tree) -> Tree:
            client = Client(
                self.federation,
                self.seed,
                id_,
                self.round,
                offset,
                count,
                self.capacity,
                self.dtype,
                self.rates.clients,
            )
            return task(client, *values, **static)

        values = [map_tree(self._cast, argument.value) for argument in arguments]
        dims = tuple(0 if isinstance(argument, Each) else None for argument in arguments)
        offset, count = self.federation.offset[:, self.ids].T, self.federation.count[:, self.ids].T
        with explain_unmappable(self.problem):
            replies = torch.vmap(one, in_dims=(0, 0, 0, *dims))(self.ids, offset, count, *values)
        if self.trains:
            sent = [type(argument)(value) for argument, value in zip(arguments, values, strict=True)]
            self.finite.append(finite_rows(replies, self.ids))
            self.requests_finite.append(finite_requests(sent, self.ids))
        if self.on_progress is not None:
            self.on_progress(False)
        return replies

    def anew(self) -> Self:
        """Return a cohort of the same clients that has sent, counted and checked nothing."""
        return replace(super().anew(), finite=[], requests_finite=[])

    def verdict(self) -> tuple[Tensor, Tensor]:
        """Return whether all replies were finite, bool [], and the client to blame, int64 []; -1 for none."""
        if not self.finite:  # no client was asked
            return torch.full((), True, device=self.ids.device), torch.full((), -1, device=self.ids.device)
        finite = torch.stack(self.finite)
        return finite.all(), first_to_blame(finite, torch.stack(self.requests_finite), self.ids)

    def _cast(self, value: Tensor) -> Tensor:
        kind = self.dtype if value.is_floating_point() else value.dtype
        return value.to(self.federation.device, kind)


class VectorEngine:
    """Runs rounds with all clients of a cohort at once.

    Args:
        federation: the data; moved to `device` once.
        method: the algorithm.
        seed: the run's seed.
        clients_per_round: number of clients in a round; 0 for an engine that only evaluates.
        device: a CUDA device, where a round becomes one graph, or the CPU.
        dtype: type of weights and inputs.
        precision: how a GPU multiplies float32 numbers: float32, tf32 or bf16.
        plan: sampling of clients, and schedules of learning rates.
    """

    name = "vector"
    processes = 1

    def __init__(
        self,
        federation: Federation,
        method: Method[Any],
        seed: int,
        clients_per_round: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: str = "float32",
        plan: RoundPlan = UNIFORM,
    ) -> None:
        check_cohort_size(federation, clients_per_round)
        self._counts = federation.count.numpy(force=True)
        self.device = torch.device(device)
        with one_thread(self.device):
            self.federation = federation.to(self.device)
        self.method, self.seed, self.dtype, self.plan = method, seed, dtype, plan
        self.clients_per_round = clients_per_round
        self.breaks_off = self.device.type == "cpu"  # recording a graph must not be interrupted
        self.ledger = Ledger()
        self._capacity = _capacity(self._counts[:, : federation.num_seen])
        self.queue = CudaQueue(self) if self.device.type == "cuda" else None
        EngineSettings.take(self, precision)

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        check_mapped(self.method.problem)
        check_embedding_mapped(self.method)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        cohort = self._cohort(self._sample(zero, self.inputs(0, 1).of_round(0))[:1], 0, self.ledger)
        server = self.method.init(self.seed, cohort)
        return map_tree(cohort._cast, server)

    def advance(self, server: Tree, first: int, rounds: int) -> Tree:
        """Return the server's state after rounds first..first+rounds-1, once they are done."""
        if self.queue is not None:
            server, under_way = self.queue.launch(server, first, rounds)
            under_way.wait()
            return server
        inputs = self.inputs(first, rounds)
        for t in range(first, first + rounds):
            server, healthy, blamed = self.checked_round(server, torch.full((), t), inputs.of_round(t - first))
            if not bool(healthy):
                self.raise_if_bad(torch.stack([torch.tensor(t), blamed]))
        return server

    def cohorts(self, clients: Ids, as_new: bool = False) -> Iterator[tuple[Ids, VectorCohort]]:
        """Yield (clients, cohort) pairs. A cohort's clients have similar numbers of samples and need little padding."""
        for group, is_new in seen_and_new(self.federation, clients, as_new):
            yield from self._cohorts(group, is_new)

    def _cohorts(self, clients: Ids, is_new: bool) -> Iterator[tuple[Ids, VectorCohort]]:
        widths = self._counts[:, clients].max(axis=0)
        by_width = np.argsort(widths, kind="stable")[::-1]
        order, widths = clients[by_width], widths[by_width]
        most = min(CLIENTS_AT_ONCE, max(1, PARAMETERS_AT_ONCE // self.method.problem.model.size))
        start = 0
        while start < len(order):
            stop = start + min(most, max(1, SAMPLES_AT_ONCE[self.device.type] // max(1, int(widths[start]))))
            chosen = np.ascontiguousarray(order[start:stop])
            ids = torch.from_numpy(chosen).to(self.device)
            yield chosen, self._cohort(ids, 0, Ledger(), _capacity(self._counts[:, chosen]), is_new)
            start = stop

    def close(self) -> None:
        """Free the graphs and restore torch's settings."""
        if self.queue is not None:
            self.queue.close()
            self.queue = None
        EngineSettings.give_back(self)

    def inputs(self, first: int, rounds: int) -> RoundInputs:
        """Return what the plan decides for rounds first..first+rounds-1, on the device, one row for each round."""
        plan, numbers = self.plan, range(first, first + rounds)
        if plan is UNIFORM:
            return NO_INPUTS
        samples, c = self._counts[TRAIN, : self.federation.num_seen], self.clients_per_round
        chosen = [ids for t in numbers if (ids := plan.clients(self.seed, t, samples, c)) is not None]
        factors = zip(*(plan.rates(t) for t in numbers), strict=True)
        return RoundInputs(
            self._to_device(np.stack(chosen), torch.int64) if chosen else None,
            *(None if None in part else self._to_device(np.array(part), self.dtype) for part in factors),
        )

    def checked_round(self, server: Tree, t: Tensor, given: RoundInputs = NO_INPUTS) -> tuple[Tree, Tensor, Tensor]:
        """Return the state after round t, whether all replies were finite, bool [], and the client to blame."""
        rates = Rates(given.client_factor, given.server_factor)
        cohort = self._cohort(self._sample(t, given), t, self.ledger, trains=True, rates=rates)
        return self.method.round(server, cohort), *cohort.verdict()

    def raise_if_bad(self, bad: Tensor) -> None:
        """Raise PefllError if a round had a reply that is not finite.

        Args:
            bad: int64 [2], the first round with such a reply, and the client to blame; -1 for none.
        """
        round_, client = bad.tolist()
        if round_ >= 0:
            who = None if client < 0 else self.federation.name_of(client)
            raise not_finite("training", who, round_, own_loss_of(self.method.problem.task))

    def _sample(self, t: Tensor, given: RoundInputs = NO_INPUTS) -> Tensor:
        if given.clients is not None:
            return given.clients
        return sample_cohort(self.federation, self.seed, t, self.clients_per_round)

    def _to_device(self, values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        copied = torch.from_numpy(values).to(dtype)
        # From pinned memory, so that the host does not wait for the rounds that are under way.
        return copied.pin_memory().to(self.device, non_blocking=True) if self.queue is not None else copied

    def _cohort(
        self,
        ids: Tensor,
        t: Tensor | int,
        ledger: Ledger,
        capacity: tuple[int, int, int] | None = None,
        is_new: bool = False,
        trains: bool = False,
        rates: Rates = CONSTANT,
    ) -> VectorCohort:
        if isinstance(t, int):
            t = torch.full((), t, dtype=torch.int64, device=self.device)
        return VectorCohort(
            size=len(ids),
            ledger=ledger,
            federation=self.federation,
            problem=self.method.problem,
            seed=self.seed,
            dtype=self.dtype,
            ids=ids,
            is_new=is_new,
            round=t,
            capacity=capacity or self._capacity,
            trains=trains,
            rates=rates,
        )


def _capacity(counts: Any) -> tuple[int, int, int]:
    """Return the largest number of samples that a client has, for each split; `counts` is [3, clients]."""
    train, validation, test = (int(row.max()) if row.size else 0 for row in counts)
    return train, validation, test
