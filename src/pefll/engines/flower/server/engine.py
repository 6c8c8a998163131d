"""Rounds with real clients, which may fail at any time.

A method's round has a fixed cohort. When a client fails, the engine starts the round again without that client. If a
request is the same as before, the engine does not repeat it, but uses the earlier reply. A reply depends only on
(seed, round, client) and the request. So the result is the same as if the failed client had never been in the round. If
too few clients are left, the engine discards the round and repeats it later.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.tree import Tree, map_tree
from pefll.core.wording import counted
from pefll.data.samples import TRAIN
from pefll.engines.cohort import Ids, Ledger, check_cohort_size, sampled, seen_and_new
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import pack
from pefll.engines.flower.protocol.names import DELIVER, SHARED
from pefll.engines.flower.server.cohort import FlowerCohort
from pefll.engines.flower.server.exchange import OutgoingRequest, exchange
from pefll.engines.flower.server.reply import (
    Missing,
    Reply,
    ReplyForms,
    check_count,
    check_sums,
    count_place,
    norm_outliers,
    read_reply,
)
from pefll.engines.flower.server.request import Request, RequestKey, RoundCache
from pefll.engines.flower.server.roster import Roster
from pefll.engines.flower.server.terms import Dropped, OutOfTime, Report, Terms
from pefll.engines.round_plan import CONSTANT, UNIFORM, Rates, RoundPlan
from pefll.engines.settings import EngineSettings
from pefll.engines.synchronous import SynchronousEngine
from pefll.methods.contract import Each, Method

CLIENTS_AT_ONCE = 256  # clients per evaluation cohort; limits the memory for large federations


class FlowerEngine(SynchronousEngine):
    """Runs rounds with clients on other machines, through Flower.

    Args:
        grid: Flower's connection to the nodes.
        agreement: the agreement between server and clients.
        names: names of the training clients; a client's number is its index here.
        clients_per_round: number of clients in a round; 0 for an engine that only evaluates.
        terms: deadlines, quorum and limits.
        report: called with one sentence for each client that fails.
        template: for resumed runs, a state of the right shape. `start` returns it and asks no client.
        newcomers: names of clients that do not train; their numbers follow those of `names`.
        plan: sampling of clients, and schedules of learning rates.

    Attributes:
        roster: the connected clients and their nodes.
        dropped: (round, client name, reason) for each client that was left out of a round.
    """

    name = "flower"
    breaks_off = False  # an exchange that has begun is completed
    processes = 1

    def __init__(
        self,
        grid: Any,
        agreement: Agreement,
        names: Sequence[str],
        clients_per_round: int,
        terms: Terms | None = None,
        report: Report | None = None,
        template: Tree | None = None,
        newcomers: Sequence[str] = (),
        plan: RoundPlan = UNIFORM,
    ) -> None:
        self.plan = plan
        self.grid, self.agreement, self.terms = grid, agreement, terms or Terms()
        self.method: Method[Any] = agreement.build()
        self.seed, self.dtype, self.device = agreement.seed, agreement.dtype, torch.device("cpu")
        self.ledger = Ledger()
        self.clients_per_round = clients_per_round
        self.dropped: list[tuple[int, str, str]] = []
        self.report: Report = report or (lambda sentence: None)
        self._template = template
        self.roster = Roster(grid, agreement, names, newcomers, self.terms, self.report)
        self.reply_forms = ReplyForms(agreement)
        self.federation = self.roster.federation
        check_cohort_size(self.federation, clients_per_round)
        EngineSettings.take(self)

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        if self._template is not None:
            return map_tree(self.cast, self._template)
        sampled = self._sample(0).tolist()
        began = time.monotonic()
        while True:
            self.roster.present()
            for client in sampled:
                # If the first sampled client fails, the next one takes its place.
                try:
                    cohort = self._cohort([client], 0, RoundCache("0", ends=self._deadline()))
                    return map_tree(self.cast, self.method.init(self.seed, cohort))
                except Dropped as lost:
                    self._record_dropped(0, lost.faults)
                except OutOfTime:
                    self._record_dropped(0, {client: "took too long"})
            self._wait(began, "no client answered before the first round")

    def cohorts(self, clients: Ids, as_new: bool = False) -> Iterator[tuple[Ids, FlowerCohort]]:
        """Yield (clients, cohort) pairs that cover all `clients`."""
        for group, is_new in seen_and_new(self.federation, clients, as_new):
            for start in range(0, len(group), CLIENTS_AT_ONCE):
                chosen = group[start : start + CLIENTS_AT_ONCE]
                cache = RoundCache(secrets.token_hex(8))
                yield chosen, self._cohort(chosen.tolist(), 0, cache, trains=False, is_new=is_new)

    def close(self) -> None:
        """Restore torch's settings; clients keep running."""
        EngineSettings.give_back(self)

    def cast(self, value: Tensor) -> Tensor:
        """Return a value in the engine's precision."""
        return value.to("cpu", self.dtype if value.is_floating_point() else value.dtype)

    def _round(self, server: Tree, t: int) -> Tree:
        """Return the state after a round with those sampled clients that complete all exchanges of the round."""
        sampled = self._sample(t).tolist()
        quorum = max(1, math.ceil(self.terms.quorum * len(sampled)))
        began = time.monotonic()
        cache = RoundCache(f"{t:x}")
        while True:
            cache.ends = self._deadline()
            dropped = self.roster.absent(sampled)
            self._record_dropped(t, dropped)
            while len(sampled) - len(dropped) >= quorum:
                ids = [client for client in sampled if client not in dropped]
                try:
                    return self.method.round(server, self._cohort(ids, t, cache, rates=self.plan.rates(t)))
                except Dropped as lost:
                    self._record_dropped(t, lost.faults)
                    dropped |= lost.faults
                except OutOfTime:
                    self.report(f"round {t}: it took more than {self.terms.round_seconds:.3g} s")
                    break
            left = len(sampled) - len(dropped)
            self._wait(began, f"round {t}: {left} of {counted(len(sampled), 'client')} left, but {quorum} are needed")

    def _wait(self, began: float, sentence: str) -> None:
        """Report that a round is repeated, and pause; raise PefllError after `patience_seconds`."""
        if time.monotonic() - began > self.terms.patience_seconds:
            raise PefllError(
                f"{sentence}; the server tried for {self.terms.patience_seconds:.3g} s: start the run again later",
                code="PEFLL-F436",
            )
        self.report(f"{sentence}; the server tries again")
        time.sleep(self.terms.pause_seconds)

    def _record_dropped(self, t: int, faults: dict[int, str]) -> None:
        """Record and report the clients that a round leaves out."""
        for client, reason in faults.items():
            self.dropped.append((t, self.federation.name_of(client), reason))
            self.report(f"round {t}: {self.federation.name_of(client)} is left out: it {reason}")

    def _deadline(self) -> float:
        return time.monotonic() + self.terms.round_seconds

    def _sample(self, t: int) -> Ids:
        return sampled(self.plan, self.federation, self.seed, t, self.clients_per_round)

    def _cohort(
        self,
        ids: list[int],
        t: int,
        cache: RoundCache,
        trains: bool = True,
        is_new: bool = False,
        rates: Rates = CONSTANT,
    ) -> FlowerCohort:
        return FlowerCohort(
            size=len(ids),
            ids=torch.tensor(ids, dtype=torch.int64),
            is_new=is_new,
            ledger=Ledger(),  # not used afterwards; the engine's ledger counts the bytes that were really sent
            engine=self,
            round=t,
            trains=trains,
            cache=cache,
            rates=rates,
        )

    def deliver(self, cohort: FlowerCohort, theta: Tensor) -> dict[int, str]:
        """Send each client its personal model, which the client writes to its own disk.

        Args:
            cohort: the clients.
            theta: [c, D], the models that `personalize` returned for this cohort.

        Returns:
            The clients that did not get a model, with the reason.
        """
        _, faults = self.gather(cohort.request(DELIVER, [Each(self.cast(theta))], {}), ())
        return cohort.missing | faults

    def gather(self, ask: Request, form: Tree) -> tuple[dict[int, list[Tensor]], dict[int, str]]:
        """Send a request to every client of a cohort that has not failed yet.

        Returns:
            The tensors of each valid reply, and a reason for each client without a valid reply.
        """
        cache, nodes = ask.cache, self.roster.nodes
        wanted = [client for client in ask.clients if client not in ask.failed]
        faults = {client: "is not connected" for client in wanted if client not in nodes}
        ledger = self.ledger if ask.trains else Ledger()
        replies: dict[int, Reply] = {}
        asked: dict[int, RequestKey] = {}
        to_ask = [client for client in wanted if client not in faults]
        forget: set[int] = set()
        while to_ask:
            requests: dict[int, OutgoingRequest] = {}
            down: dict[int, int] = {}
            for client in to_ask:
                knows = set() if client in forget else cache.sent.get(client, set())
                header, tensors, asked[client] = ask.message_for(client, knows)
                known = cache.reply_to(ask.exchange, client, asked[client])
                if known is not None:
                    replies[client] = known
                    continue
                requests[client] = OutgoingRequest(nodes[client], ask.kind, pack(header, tensors))
                shared = {what for kind, what in header["places"] if kind == SHARED}
                cache.sent.setdefault(client, set()).update(shared)
                down[client] = sum(leaf.nbytes for leaf in tensors.values())
            if not requests:
                break
            ledger.exchanges += 1
            outcome = exchange(
                self.grid,
                requests,
                self._seconds(cache),
                ask.name,
                lambda client, content: self._accept(ask, client, content, form),
            )
            ledger.down += sum(down.values()) + sum(down[client] for client in outcome.sent_again)
            if outcome.strays:
                strays = f"{outcome.strays:,} repl{'y' if outcome.strays == 1 else 'ies'}"
                self.report(f"round {ask.round}: ignored {strays} that nobody asked for")
            faults |= outcome.faults
            # A node that restarted during the round has lost its cached tensors. The server sends them once more.
            asked_again = [c for c, reply in outcome.replies.items() if isinstance(reply, Missing)]
            faults |= {c: "loses the tensors that it is sent" for c in asked_again if c in forget}
            to_ask = [c for c in asked_again if c not in forget]
            forget |= set(to_ask)
            for client, reply in outcome.replies.items():
                if not isinstance(reply, Missing):
                    replies[client] = reply
                    cache.note_reply(ask.exchange, client, asked[client], reply)
                    ledger.up += sum(leaf.nbytes for leaf in reply.tensors)
        for client, reason in norm_outliers(replies, self.terms.norm_limit).items():
            faults[client] = reason
            del replies[client]
        tensors_of = {client: reply.tensors for client, reply in replies.items()}
        return (tensors_of if ask.scores else self._with_limited_counts(tensors_of, form)), faults

    def _with_limited_counts(self, replies: dict[int, list[Tensor]], form: Tree) -> dict[int, list[Tensor]]:
        """Return the replies with each sample count limited by `weight_limit`."""
        place = count_place(form)
        if place is None:
            return replies
        declared = {client: float(tensors[place]) for client, tensors in replies.items()}
        for client, samples in self.roster.limits.limited(declared, self.terms.weight_limit, "in training").items():
            if samples < declared[client]:
                like = replies[client][place]
                replies[client] = [
                    *replies[client][:place],
                    torch.full_like(like, samples),
                    *replies[client][place + 1 :],
                ]
        return replies

    def weighed(self, clients: Ids, sums: Any, chooses: bool) -> Any:
        """Return clients' sums, scaled down to each client's limited number of samples.

        Args:
            clients: the clients' numbers [clients].
            sums: float64 [clients, width], see `LimitsWeights`.
            chooses: whether these sums choose the best round; `choice_limit` then replaces `weight_limit`.
        """
        declared = dict(zip(clients.tolist(), sums[:, 0].tolist(), strict=True))
        times = self.terms.choice_limit if chooses else self.terms.weight_limit
        use = "in the choice of the best round" if chooses else "in a test"
        counts = self.roster.limits.limited(declared, times, use)
        shares = [counts[c] / n if counts[c] < n else 1.0 for c, n in declared.items()]
        return sums * np.array(shares)[:, None]

    def _accept(self, ask: Request, client: int, content: Any, form: Tree) -> Reply | Missing:
        """Return a client's reply after all checks; BadMessage if the reply is invalid."""
        reply = read_reply(content, ask.header(client) | {"name": self.federation.name_of(client)}, form)
        if isinstance(reply, Missing):
            return reply
        if ask.scores:
            declared = self.roster.declared(client, ask.static.get("split"))
            check_sums(reply, form, self.method.problem.task, declared)
        elif (place := count_place(form)) is not None:
            check_count(reply, place, self.roster.declared(client, TRAIN))
        return reply

    def _seconds(self, cache: RoundCache) -> float:
        """Return the time limit of the next exchange; raise OutOfTime after the deadline of this attempt."""
        left = cache.ends - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return min(self.terms.exchange_seconds, left)
