"""Deadlines, quorum and limits of rounds with real clients, and the exceptions for missing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pefll.core.errors import PefllError

Report = Callable[[str], None]


@dataclass(frozen=True)
class Terms:
    """Deadlines, quorum and limits.

    Attributes:
        exchange_seconds: time limit for the replies of one exchange.
        round_seconds: time limit for one attempt at a round; then the round is repeated.
        quorum: the share of a round's clients that must complete all exchanges.
        pause_seconds: pause before a round is repeated.
        patience_seconds: how long one round may be repeated; then the run stops, and its checkpoints stay.
        norm_limit: a reply is refused if its norm is more than this many times the cohort's median. With fewer than
            three replies nothing is refused; 0 for no limit.
        weight_limit: a client's weight in a mean over samples is at most this many times the median client's; 0 for no
            limit.
        choice_limit: the same limit when sums choose the best round. It is lower, so that no client chooses by itself.
        sample_limit: no client counts as more samples than this; 0 for no limit.
    """

    exchange_seconds: float = 120.0
    round_seconds: float = 600.0
    quorum: float = 0.5
    pause_seconds: float = 5.0
    patience_seconds: float = 3600.0
    norm_limit: float = 1000.0
    weight_limit: float = 10.0
    choice_limit: float = 2.0
    sample_limit: float = 1e7

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise PefllError(
                f"quorum is {self.quorum}; it must be a share of a round's clients, more than 0 and up to 1",
                code="PEFLL-F456",
            )
        if min(self.exchange_seconds, self.round_seconds) <= 0:
            raise PefllError("exchange_seconds and round_seconds must be more than 0", code="PEFLL-F457")
        for name in ("weight_limit", "choice_limit"):
            if not (getattr(self, name) == 0 or getattr(self, name) >= 1):
                raise PefllError(
                    f"{name} is {getattr(self, name):g}; it must be 1 or more times the median, or 0 for no limit",
                    code="PEFLL-P001",
                )
        if not (self.sample_limit == 0 or self.sample_limit >= 1):
            raise PefllError(
                f"sample_limit is {self.sample_limit:g}; give 1 sample or more, or 0 for no limit", code="PEFLL-P006"
            )


class Dropped(Exception):
    """Clients failed in training. `faults` has a reason for each: the end of a sentence that begins with its name."""

    def __init__(self, faults: dict[int, str]) -> None:
        super().__init__(str(faults))
        self.faults = faults


class OutOfTime(Exception):
    """An attempt at a round took too long."""
