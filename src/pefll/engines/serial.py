"""The serial engine: one client after another, in one process per core. It is the reference for other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.tree import Tree, leaves, map_tree
from pefll.data.client import Client
from pefll.data.federation import Federation
from pefll.engines.cohort import (
    BaseCohort,
    Ids,
    Ledger,
    check_cohort_size,
    client_to_blame,
    not_finite,
    sampled,
    seen_and_new,
)
from pefll.engines.round_plan import CONSTANT, UNIFORM, Rates, RoundPlan
from pefll.engines.settings import EngineSettings
from pefll.engines.synchronous import SynchronousEngine
from pefll.engines.workers import Workers
from pefll.methods.contract import ClientState, Each, Everyone, Method
from pefll.tasks.checking import own_loss_of

# Number of clients in an evaluation's cohort: enough to keep every process busy, few enough for frequent progress.
CLIENTS_AT_ONCE = 16
# Most weights that these clients' models have together, 0.3 GB. It matters for models of 4 million weights and more.
PARAMETERS_AT_ONCE = 1 << 26
ALIGNMENT = 64  # bytes


@dataclass(eq=False, kw_only=True)
class SerialCohort(BaseCohort):
    """A cohort whose clients run one after another, in this process or shared among workers."""

    engine: SerialEngine
    round: int
    trains: bool

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        cast = [type(argument)(map_tree(self.engine.cast, argument.value)) for argument in arguments]
        name = getattr(task, "__name__", "")
        ids, rate = self.ids.numpy(), self.rates.clients
        assert not isinstance(rate, Tensor)  # this engine's factors are numbers
        if self.engine.workers is not None and getattr(self.engine.method, name, None) == task:
            replies = self.engine.workers.run(name, ids, self.round, cast, static, self.on_progress, rate)
        else:
            replies = self.engine.run_here(task, ids, self.round, cast, static, self.on_progress, rate)
        # Who asks for sums checks them, and knows a metric that is not finite from training that diverged.
        are_sums = not self.trains and self.engine.method.predict == task
        if not are_sums and not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(replies)):
            client = int(client_to_blame(replies, self.ids, cast))
            who = None if client < 0 else self.engine.federation.name_of(client)
            loss = own_loss_of(self.engine.method.problem.task)
            raise not_finite(name or "a task", who, self.round if self.trains else None, loss)
        return replies


def aligned(value: Tensor) -> Tensor:
    """Return a tensor with the same values at an aligned address. torch allocates its own tensors at such addresses.

    At other addresses some libraries add in another order, and so round differently. A client's result must not depend
    on the row of an array, or on the message, that its model came from.
    """
    return value if value.data_ptr() % ALIGNMENT == 0 else value.clone()


class SerialEngine(SynchronousEngine):
    """Runs rounds with one client after another.

    Args:
        federation: the data.
        method: the algorithm.
        seed: the run's seed.
        clients_per_round: number of clients in a round; 0 for an engine that only evaluates.
        dtype: type of weights and inputs.
        processes: number of processes that share the clients; with 1, this process runs all clients.
        plan: sampling of clients, and schedules of learning rates.
    """

    name = "serial"
    breaks_off = True

    def __init__(
        self,
        federation: Federation,
        method: Method[Any],
        seed: int,
        clients_per_round: int,
        dtype: torch.dtype = torch.float32,
        processes: int = 1,
        plan: RoundPlan = UNIFORM,
    ) -> None:
        check_cohort_size(federation, clients_per_round)
        self.federation, self.method, self.seed, self.dtype, self.plan = federation, method, seed, dtype, plan
        self.clients_per_round = clients_per_round
        self.device = torch.device("cpu")
        self.ledger = Ledger()
        self.processes = processes
        self.workers: Workers | None = Workers(self.run_here, method, processes) if processes > 1 else None
        EngineSettings.take(self)

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        cohort = self._cohort(self._sample(0)[:1], 0, self.ledger)
        return map_tree(self.cast, self.method.init(self.seed, cohort))

    def _round(self, server: Tree, t: int) -> Tree:
        return self.method.round(server, self._cohort(self._sample(t), t, self.ledger, rates=self.plan.rates(t)))

    def cohorts(self, clients: Ids, as_new: bool = False) -> Iterator[tuple[Ids, SerialCohort]]:
        """Yield (clients, cohort) pairs that cover all `clients`."""
        most = min(CLIENTS_AT_ONCE, max(1, PARAMETERS_AT_ONCE // max(1, self.method.problem.model.size)))
        for group, is_new in seen_and_new(self.federation, clients, as_new):
            for start in range(0, len(group), most):
                chosen = group[start : start + most]
                yield chosen, self._cohort(chosen, 0, Ledger(), trains=False, is_new=is_new)

    def close(self) -> None:
        """End the processes and restore torch's settings."""
        if self.workers is not None:
            self.workers.close()
            self.workers = None
        EngineSettings.give_back(self)

    def cast(self, value: Tensor) -> Tensor:
        """Return a value on the CPU in the engine's precision."""
        return value.to("cpu", self.dtype if value.is_floating_point() else value.dtype)

    def run_here(
        self,
        task: Callable[..., Tree],
        ids: Ids,
        round_: int,
        arguments: list[Everyone | Each],
        static: dict[str, int],
        on_progress: Callable[[bool], None] | None = None,
        lr_factor: float | None = None,
    ) -> Tree:
        """Run a task on clients in this process and return the replies with a leading client axis."""
        replies = []
        given = [arg if isinstance(arg, Each) else Everyone(map_tree(aligned, arg.value)) for arg in arguments]
        for place, id_ in enumerate(ids.tolist()):
            values = [
                map_tree(lambda leaf, place=place: aligned(leaf[place]), argument.value)
                if isinstance(argument, Each)
                else argument.value
                for argument in given
            ]
            replies.append(task(self._client(id_, round_, lr_factor), *values, **static))
            if on_progress is not None:
                on_progress(isinstance(replies[-1], ClientState))
        if not replies:
            raise PefllError("a cohort has no clients; give it at least one", code="PEFLL-E011")
        return map_tree(lambda *parts: torch.stack(parts), *replies)

    def _client(self, id_: int, round_: int, lr_factor: float | None = None) -> Client:
        count = self.federation.count[:, id_]
        train, validation, test = count.tolist()
        return Client(
            federation=self.federation,
            seed=self.seed,
            id=torch.tensor(id_),
            round=torch.tensor(round_),
            offset=self.federation.offset[:, id_],
            count=count,
            capacity=(train, validation, test),
            dtype=self.dtype,
            lr_factor=lr_factor,
        )

    def _sample(self, t: int) -> Ids:
        return sampled(self.plan, self.federation, self.seed, t, self.clients_per_round)

    def _cohort(
        self,
        ids: Ids,
        t: int,
        ledger: Ledger,
        trains: bool = True,
        is_new: bool = False,
        rates: Rates = CONSTANT,
    ) -> SerialCohort:
        chosen = torch.from_numpy(np.array(ids, dtype=np.int64))
        return SerialCohort(
            size=len(ids),
            ids=chosen,
            is_new=is_new,
            ledger=ledger,
            engine=self,
            round=t,
            trains=trains,
            rates=rates,
        )
