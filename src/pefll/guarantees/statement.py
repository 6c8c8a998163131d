"""One guarantee: a bound, the confidence with which it holds, what it promises, and what it assumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Statement(NamedTuple):
    """A bound that holds with probability `confidence` over the draw of the data.

    Attributes:
        name: identifies the statement in JSON, such as "mean-betting".
        title: what is bounded, in a few words.
        measured: the estimate that the bound is about, such as the mean over unseen clients; NaN if there is none.
        bound: the bound.
        lower: whether the bound is a lower one, as of an accuracy. Otherwise it is an upper one, as of an error.
        confidence: 1 - δ.
        promise: what the bound promises, in one sentence.
        assumes: what must be true for it, in one sentence.
        terms: the parts of the bound by name, and what it was computed from.
    """

    name: str
    title: str
    measured: float
    bound: float
    lower: bool
    confidence: float
    promise: str
    assumes: str
    terms: Mapping[str, float] = {}

    @property
    def vacuous(self) -> bool:
        """Whether a share or a loss between 0 and 1 satisfies the bound anyway."""
        return self.bound <= 0 if self.lower else self.bound >= 1

    def row(self) -> dict[str, Any]:
        """Return the statement as JSON; None instead of NaN and infinity, which JSON does not have."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        terms = {key: plain(value) for key, value in self.terms.items()}
        values = self._asdict() | {"vacuous": self.vacuous}
        return {key: plain(value) for key, value in values.items()} | {"terms": terms}
