"""Which columns of a table are features, and how a user wants them to be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pefll.core.arguments import shown, text
from pefll.core.errors import PefllError, unknown
from pefll.core.wording import argument
from pefll.data.frames import columns, feature_names, first_names
from pefll.data.raw_columns import check_rules

ENCODINGS = ("auto", "none")
# The ways to deal with missing values that leave rows without a label out.
DROPS_UNLABELLED = ("drop", "drop-unlabelled")


class Use(NamedTuple):
    """How the columns of a table are used.

    Attributes:
        features: names of the columns that are features, in order; empty for all other columns.
        drop: names of columns that are left out.
        treat: what a column is, by its name, where the values alone do not say so; see `raw_columns.RULES`.
        encode: "auto" to standardise numbers, to give categories an input per value, and to fill missing values; "none"
            to take all columns as they are. Then they must hold numbers, and none may be missing.
        time: name of the column that orders each client's samples, so that the last become test samples; or "".
        unlabelled: what happens to rows without a label: "refuse" raises PefllError, "drop" leaves them out.
    """

    features: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    treat: Mapping[str, str] = {}
    encode: str = "auto"
    time: str = ""
    unlabelled: str = "refuse"


AS_IT_IS = Use()


def use_of(
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
    treat: Mapping[str, str] | None = None,
    encode: str = "auto",
    time: str = "",
    missing: str = "impute",
) -> Use:
    """Return how columns are used, after checks of a user's arguments.

    `missing` says what happens to rows with missing values, see `selecting.selected`. That happens later, but rows
    without a label are left out, or refused, when the table is read.
    """
    if text(encode, "encode", "auto") not in ENCODINGS:
        raise unknown("encoding", encode, ENCODINGS)
    if treat is not None and not isinstance(treat, Mapping):
        raise PefllError(f"treat is {shown(treat)}; give a dictionary such as {{'joined': 'date'}}", "PEFLL-A580")
    treat = {text(name, "a column"): text(rule, "a rule", "date") for name, rule in (treat or {}).items()}
    if encode == "none" and treat:
        raise PefllError(
            f"{argument('treat')} is of no use with {argument('encode', 'none')}, which encodes nothing; choose one",
            code="PEFLL-D599",
        )
    unlabelled = "drop" if text(missing, "missing", "impute") in DROPS_UNLABELLED else "refuse"
    return Use(tuple(features), tuple(drop), treat, encode, text(time, "time"), unlabelled)


def refuse_use(use: Use, name: str) -> None:
    """Raise PefllError if a user said how to use the columns of data that is no table."""
    for what, given in (
        (argument("features"), use.features),
        (argument("drop"), use.drop),
        (argument("treat"), use.treat),
        (argument("time", option="--time-column"), use.time),
    ):
        if given:
            raise PefllError(f"{name} is no table; omit {what}, which is about columns of tables", "PEFLL-D598")


def chosen_features(
    frame: Any, features: tuple[str, ...], kept: Sequence[str | None], use: Use, name: str
) -> tuple[str, ...]:
    """Return the names of the features; PefllError for names that cannot be features."""
    there, special = columns(frame), [each for each in kept if each]
    for each in use.drop:
        if each not in there:
            raise PefllError(
                f"{name}: {argument('drop', each)} names no column; there are {first_names(there)}: correct the name",
                "PEFLL-D591",
            )
    for each in features:
        if each in special:
            raise PefllError(
                f"{name}: {each!r} is the column of labels, clients or splits; it cannot be a feature: leave it out of "
                f"{argument('features')}",
                code="PEFLL-D592",
            )
        if each in use.drop:
            raise PefllError(f"{name}: {each!r} is both a feature and to be dropped; choose one", code="PEFLL-D593")
    if twice := [each for each, number in Counter(features).items() if number > 1]:
        raise PefllError(f"{name}: {twice[0]!r} is named twice among the features; name it once", code="PEFLL-D594")
    chosen = features or feature_names(frame, (*special, *use.drop, use.time), name)
    check_rules(use.treat, chosen, name)
    return chosen
