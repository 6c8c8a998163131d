"""One guarantee: a bound, the confidence with which it holds, what it promises, and what it assumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

LEAST = 1e-3  # a tenth of a per cent, to which bounds are shown
ROUNDING = 1e-12


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

    def __str__(self) -> str:
        nothing = " This bound says nothing." if self.vacuous and "says nothing" not in self.promise else ""
        return f"With confidence {round(100 * self.confidence, 6):g}%: {self.promise}{nothing}"

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing of a share or a loss between 0 and 1, to a tenth of a per cent.

        A page shows such a bound as at least 0.0%, or as at most 100.0%.
        """
        return self.bound < LEAST - ROUNDING if self.lower else self.bound > 1 - LEAST + ROUNDING

    def row(self) -> dict[str, Any]:
        """Return the statement as JSON; None instead of NaN and infinity, which JSON does not have."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        terms = {key: plain(value) for key, value in self.terms.items()}
        values = self._asdict() | {"vacuous": self.vacuous}
        return {key: plain(value) for key, value in values.items()} | {"terms": terms}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Statement:
        """Return the statement whose JSON `row` is; ValueError, KeyError or TypeError if it makes no sense."""
        texts, lower = [row[name] for name in ("name", "title", "promise", "assumes")], row["lower"]
        if not all(isinstance(text, str) for text in texts) or not isinstance(lower, bool):
            raise ValueError("its texts are no texts")
        measured = math.nan if row["measured"] is None else float(row["measured"])
        useless = -math.inf if lower else math.inf  # JSON has no infinity
        bound, confidence = useless if row["bound"] is None else float(row["bound"]), float(row["confidence"])
        if math.isnan(bound) or not 0 < confidence < 1:
            raise ValueError(f"the bound is {bound} with confidence {confidence}")
        name, title, promise, assumes = texts
        terms = {key: math.nan if value is None else value for key, value in dict(row["terms"]).items()}
        return cls(name, title, measured, bound, lower, confidence, promise, assumes, terms)


def rounded_up(bound: float) -> str:
    """Return an upper bound with three digits after the point, so that the text never promises more than the bound."""
    return f"{math.ceil(1000 * bound - 1e-9) / 1000:g}" if bound <= 1 else f"{bound:.3g}"
