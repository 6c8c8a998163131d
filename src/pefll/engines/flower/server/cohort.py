"""A cohort of clients on other machines."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.tree import Tree, leaves, map_tree
from pefll.engines.cohort import BaseCohort, Ledger
from pefll.engines.flower.server.kept_reference import KeptReference
from pefll.engines.flower.server.request import Request, RoundCache
from pefll.engines.flower.server.terms import Dropped
from pefll.methods.contract import ClientState, Each, Everyone

if TYPE_CHECKING:
    from pefll.engines.flower.server.engine import FlowerEngine


@dataclass(eq=False, kw_only=True)
class FlowerCohort(BaseCohort):
    """Clients on other machines; each `run` is one exchange.

    Attributes:
        engine: sends the requests.
        round: number of the training round; 0 in an evaluation.
        trains: whether this is training. If a client fails in training, `run` raises `Dropped`. In an evaluation all
            numbers of a failed client are 0. Its number of samples is 0 too, so no mean includes it.
        cache: requests and replies of this round or evaluation.
        missing: clients that failed in this evaluation, with the reason.
    """

    engine: FlowerEngine
    round: int
    trains: bool
    cache: RoundCache
    missing: dict[int, str] = field(default_factory=dict)
    _exchange: int = 0

    def anew(self) -> FlowerCohort:
        """Return the same clients with an empty cache and ledger, for another evaluation."""
        return replace(
            self, ledger=Ledger(), _known=[], cache=RoundCache(secrets.token_hex(8)), missing={}, _exchange=0
        )

    def request(self, task: str, arguments: Sequence[Everyone | Each], static: dict[str, int]) -> Request:
        """Return the request of the next exchange."""
        factor = self.rates.clients
        assert not isinstance(factor, Tensor)  # this engine's factors are numbers
        return Request(
            task=task,
            arguments=arguments,
            static=static,
            clients=self.ids.tolist(),
            failed=set(self.missing),
            round=self.round,
            trains=self.trains,
            exchange=self._exchange,
            cache=self.cache,
            agreement=self.engine.agreement.sha256,
            lr_factor=factor,
        )

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        cast = [type(argument)(map_tree(self.engine.cast, argument.value)) for argument in arguments]
        name = getattr(task, "__name__", "")
        if getattr(self.engine.method, name, None) != task:
            raise PefllError(
                f"clients on other machines run only functions of their method: make {name or task} one of them",
                code="PEFLL-F435",
            )
        if not self.trains and not self._exchange:
            self.missing |= self.engine.roster.absent(self.ids.tolist())
        form = self.engine.reply_forms.form_of_reply(task, cast, static)
        ask = self.request(name, cast, static)
        self._exchange += 1
        replies, faults = self.engine.gather(ask, form)
        if faults and self.trains:
            raise Dropped(faults)
        for client, reason in faults.items():
            self.engine.report(f"evaluation: {self.engine.federation.name_of(client)} {reason}")
        self.missing |= faults
        nothing = [torch.zeros_like(leaf) for leaf in leaves(form, but=ClientState)]
        rows = [replies.get(client, nothing) for client in ask.clients]
        stacked = iter([torch.stack(parts) for parts in zip(*rows, strict=True)])
        return self._assemble(form, stacked, count(), ask.reference)

    def _assemble(self, form: Tree, sent: Iterator[Tensor], kept: Iterator[int], reference: KeptReference) -> Tree:
        """Return the replies with a leading client axis, and with references to the tensors that clients keep."""
        if isinstance(form, ClientState):
            return ClientState(
                map_tree(
                    lambda leaf: torch.full(
                        (self.size, *leaf.shape), reference._replace(leaf=next(kept)).value, dtype=leaf.dtype
                    ),
                    form.value,
                )
            )
        if isinstance(form, tuple):
            return type(form)(*(self._assemble(part, sent, kept, reference) for part in form))
        return next(sent)
