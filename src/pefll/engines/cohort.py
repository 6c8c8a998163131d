"""The client interface: every engine sends requests and gets replies through it. It counts the bytes of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core import randomness
from pefll.core.errors import Diverged, PefllError
from pefll.core.tree import Tree, leaves, map_tree, rows_are_finite
from pefll.core.wording import counted
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN
from pefll.engines.round_plan import CONSTANT, Rates, RoundPlan
from pefll.methods.contract import ClientState, Each, Everyone, Method

Ids = npt.NDArray[np.int64]


@dataclass
class Ledger:
    """Counts of exchanges, and of tensor bytes sent down to clients and up to the server."""

    down: int = 0
    up: int = 0
    exchanges: int = 0

    def copy(self) -> Ledger:
        """Return a copy of the counts."""
        return Ledger(self.down, self.up, self.exchanges)

    def add(self, other: Ledger, times: int = 1) -> None:
        """Add another ledger's counts."""
        self.down += times * other.down
        self.up += times * other.up
        self.exchanges += times * other.exchanges

    def since(self, earlier: Ledger) -> Ledger:
        """Return the counts since `earlier` was copied."""
        return Ledger(self.down - earlier.down, self.up - earlier.up, self.exchanges - earlier.exchanges)


@dataclass(eq=False, kw_only=True)
class BaseCohort:
    """Base class of every engine's cohort. A subclass defines `_reach`.

    Attributes:
        size: number of clients.
        ids: int64 [size], the clients' numbers in the federation.
        is_new: whether these clients never took part in training.
        ledger: counts bytes.
        on_progress: called often while clients work. It shows progress, and may raise an exception to stop the work.
            Its argument is True after a client has stored something, such as its model. The flower engine ignores it.
        rates: factors of the learning rates in this round.
    """

    size: int
    ids: Tensor
    is_new: bool = False
    ledger: Ledger
    on_progress: Callable[[bool], None] | None = None
    rates: Rates = CONSTANT
    _known: list[Tensor] = field(default_factory=list)

    def run(self, task: Callable[..., Tree], *arguments: Everyone | Each | ClientState, **static: int) -> Tree:
        """Run `task(client, *arguments)` on every client of the cohort.

        Args:
            task: a method's function for one client.
            arguments: `everyone(value)` and `each(value)` are sent; the clients already have `client_state(value)`.
            static: small integers that select a variant of the task, such as the split.

        Returns:
            The replies, with a leading client axis.
        """
        self.ledger.down += self.size * sum(self.bytes_to_send(argument) for argument in arguments)
        handed = tuple(self._for_engine(argument) for argument in arguments)
        replies = self._reach(task, handed, static)
        self.ledger.up += sum(leaf.nbytes for leaf in leaves(replies, but=ClientState))
        self.ledger.exchanges += 1
        sent = {id(leaf) for leaf in leaves(replies, but=ClientState)}
        self._known += [leaf for leaf in leaves(replies) if id(leaf) not in sent]
        return replies

    def keep(self, memory: Tree, kept: ClientState) -> Tree:
        """Return `memory`, the arrays of all clients, with this cohort's rows replaced by `kept`."""
        return map_tree(lambda old, new: old.index_copy(0, self.ids, new.to(old)), memory, kept.value)

    def client_rate(self, lr: float) -> float | Tensor:
        """Return a client's learning rate in this round: `lr`, times the factor of the run's schedule."""
        return lr if self.rates.clients is None else lr * self.rates.clients

    def server_rate(self, lr: float) -> float | Tensor:
        """Return a learning rate of the server in this round: `lr`, times the factor of the run's schedule."""
        return lr if self.rates.server is None else lr * self.rates.server

    def anew(self) -> Self:
        """Return a fresh cohort of the same clients, with an empty ledger."""
        return replace(self, ledger=Ledger(), _known=[])

    def bytes_to_send(self, argument: Everyone | Each | ClientState) -> int:
        """Return the bytes to send to one client. Values that the client already has are not sent again."""
        total = 0
        for leaf in () if isinstance(argument, ClientState) else leaves(argument.value):
            if any(leaf is known for known in self._known):
                continue
            if isinstance(argument, Each):
                total += leaf.nbytes // self.size
            else:
                self._known.append(leaf)
                total += leaf.nbytes
        return total

    def _for_engine(self, argument: Everyone | Each | ClientState) -> Everyone | Each:
        """Return an argument for `_reach`: a `ClientState` becomes an `Each` with this cohort's rows."""
        if not isinstance(argument, ClientState):
            return argument
        if self.is_new:
            raise PefllError(
                "the method reads client_state(...) of new clients, which have stored nothing yet; check cohort.is_new "
                "first",
                code="PEFLL-E006",
            )
        return Each(map_tree(lambda leaf: leaf.index_select(0, self.ids), argument.value))

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        raise NotImplementedError


class Engine(Protocol):
    """Runs a method's rounds.

    An engine with an asynchronous device also has a `queue`: see `device_queue.DeviceQueue`.
    """

    name: str
    federation: Federation
    method: Method[Any]
    ledger: Ledger
    device: torch.device
    dtype: torch.dtype
    clients_per_round: int
    processes: int  # number of processes on this machine that share the clients
    breaks_off: bool  # whether an exception may stop the engine at any point; close the engine afterwards

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        ...

    def advance(self, server: Tree, first: int, rounds: int) -> Tree:
        """Run rounds first..first+rounds-1, and return the server's state after them.

        Raises:
            PefllError: if training diverged.
        """
        ...

    def cohorts(self, clients: Ids, as_new: bool = False) -> Iterator[tuple[Ids, Any]]:
        """Yield (clients, cohort) pairs that cover all `clients`, for evaluation and personalisation.

        A cohort's clients are all seen or all new; with `as_new` all are treated as new. The caller checks the replies
        for NaN. So the engine does not have to wait for the replies.
        """
        ...

    def close(self) -> None:
        """Free the engine's processes and graphs."""
        ...


@runtime_checkable
class LimitsWeights(Protocol):
    """An engine that limits the weight of each client, because clients may report wrong sample counts."""

    def weighed(self, clients: Ids, sums: Any, chooses: bool) -> Any:
        """Return the sums, scaled down to each client's weight limit.

        Args:
            clients: the clients' numbers in the federation.
            sums: the task's sums of each client, float64 [clients, width]; the first one is its number of samples.
            chooses: whether these sums select the best round.
        """
        ...


def sample_cohort(federation: Federation, seed: int, round_: Tensor, size: int) -> Tensor:
    """Return the seen clients of a round, int64 [size], all different."""
    return randomness.choose(randomness.key(seed, "cohort", round_), federation.num_seen, size)


def sampled(plan: RoundPlan, federation: Federation, seed: int, t: int, size: int) -> Ids:
    """Return the seen clients of round t, int64 [size], as the plan says; `federation` is in the host's memory."""
    seen = federation.count[TRAIN, : federation.num_seen]
    chosen = None if plan.sampling is None else plan.clients(seed, t, seen.numpy(), size)
    return sample_cohort(federation, seed, torch.tensor(t), size).numpy() if chosen is None else chosen


def seen_and_new(federation: Federation, clients: Ids, as_new: bool = False) -> Iterator[tuple[Ids, bool]]:
    """Yield (clients, is_new): first the seen clients, then the new ones. With `as_new`, all are treated as new."""
    if as_new:
        yield clients, True
        return
    for chosen, is_new in ((clients < federation.num_seen, False), (clients >= federation.num_seen, True)):
        if chosen.any():
            yield clients[chosen], is_new


def check_cohort_size(federation: Federation, size: int) -> None:
    """Raise PefllError if a round cannot have `size` clients; 0 is valid, for engines that only evaluate."""
    if size < 0:
        raise PefllError(f"clients_per_round is {size}; it must be at least 1", code="PEFLL-E007")
    if size > federation.num_seen:
        raise PefllError(
            f"clients_per_round is {size:,}, but the federation has only "
            f"{counted(federation.num_seen, 'seen client')}; lower it",
            code="PEFLL-E008",
        )


def not_finite(task: str, client: str | None, round_: int | None, loss: str = "") -> Diverged:
    """Return the error for a reply with NaN or infinity.

    Args:
        task: the name of the task.
        client: the name of the first client that sent such a reply; None if unknown.
        round_: number of the training round; None in an evaluation.
        loss: the user's own loss in words, which may be the reason; "" for a loss of this package.
    """
    who = "a client" if client is None else f"client {client}"
    when = "" if round_ is None else f" at round {round_}"
    return Diverged(
        f"{who} replied with NaN or infinity in {task}{when}: training diverged; lower client_lr or server_lr"
        + (f", or correct {loss}, which may be infinite for a label" if loss else ""),
        code="PEFLL-E012",
    )


def client_to_blame(replies: Tree, ids: Tensor, sent: Iterable[Everyone | Each]) -> Tensor:
    """Return the first client of `ids` whose input was finite and whose reply was not, int64 []; -1 if none."""
    return first_to_blame(finite_rows(replies, ids), finite_requests(sent, ids), ids)


def first_to_blame(finite: Tensor, requests_finite: Tensor, ids: Tensor) -> Tensor:
    """Return the first client whose input was finite and whose reply was not, int64 []; -1 if none.

    After an overflow on the server, no input is finite, and no client is to blame. The function copies no value to the
    host, so a CUDA graph can capture it.

    Args:
        finite: bool [..., c], which replies were finite, oldest exchange first.
        requests_finite: bool [..., c], which inputs were finite.
        ids: int64 [c], the clients' numbers.
    """
    at_fault = (requests_finite & ~finite).flatten()
    first = ids.index_select(0, at_fault.int().argmax(dim=0, keepdim=True) % len(ids)).squeeze(0)
    # Use `full_like`: a Python scalar needs a host copy, which CUDA graphs do not allow.
    return torch.where(at_fault.any(), first, torch.full_like(first, -1))


def finite_requests(sent: Iterable[Everyone | Each], ids: Tensor) -> Tensor:
    """Return which clients were sent only finite numbers, bool [c]."""
    finite = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for argument in sent:
        finite = finite & finite_rows(argument.value, ids if isinstance(argument, Each) else ids[:1])
    return finite


def finite_rows(value: Tree, ids: Tensor) -> Tensor:
    """Return which rows have only finite numbers in all leaves, bool [len(ids)]; empty rows count as finite."""
    finite = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for leaf in leaves(value):
        if leaf.is_floating_point() and leaf.numel():
            finite = finite & rows_are_finite(leaf.reshape(len(ids), leaf.numel() // len(ids)))
    return finite
