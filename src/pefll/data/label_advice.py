"""What a user may do about labels that do not fit: the end of an error's sentence."""

from __future__ import annotations

import numpy as np

from pefll.core.wording import either
from pefll.data.samples import Array, Samples, for_classes, for_numbers

_ENOUGH = 10  # different labels with fractions look like numbers, not like classes with mistakes


def for_sets() -> str:
    """Return what a user gives to say that labels are sets of classes."""
    return either("--task multilabel", "labels='sets'")


def described(labels: Array) -> str:
    """Return the type and the shape of labels as words, for example `"int64 of shape [60, 3]"`."""
    kind = "texts" if labels.dtype.kind in "US" else "mixed values" if labels.dtype.kind == "O" else labels.dtype
    return f"{kind} of shape {list(labels.shape)}"


def advice(labels: Array, kind: str, chooses: bool = True) -> str:
    """Return what to do with labels that are not of a kind: one clause for each kind that they may become.

    Args:
        labels: as the user gave them.
        kind: what they should be: classes, numbers or sets.
        chooses: whether another kind is possible, too; no model has been trained on the labels yet.
    """
    if labels.ndim == 0:
        return "give one label for each sample"
    clauses = {"classes": _as_classes(labels), "numbers": _as_numbers(labels), "sets": _as_sets(labels)}
    if kind != "classes" or not clauses["classes"]:
        # The kind that was asked for comes first.
        clauses = {kind: clauses[kind]} | clauses
    wanted = [clauses[kind]] if not chooses else [clause for clause in clauses.values() if clause]
    return ", ".join(filter(None, wanted)) or _NEEDED[kind]


_NEEDED = {
    "classes": "classes need one whole number or text for each sample, [N]",
    "numbers": "numbers need one or several for each sample, [N] or [N, k]",
    "sets": "sets need 1 for each member and 0 for the others, [N, k]",
}


def many_numbers(labels: Array) -> str:
    """Return the advice for labels with fractions of which so many differ that they seem to be numbers; else ""."""
    different = np.unique(labels[np.isfinite(labels)])
    fractions = different[np.floor(different) != different]
    return f"; if labels are numbers, add {for_numbers()}" if len(fractions) >= _ENOUGH else ""


def one_hot_note(samples: Samples) -> str:
    """Return a sentence if each set has one member, because the labels may be classes in one-hot form; else ""."""
    if samples.labels != "sets" or samples.y.shape[1] < 2 or not _is_one_hot(samples.y):
        return ""
    return (
        f"{samples.name}: each set of labels has exactly one member; if these are classes, "
        f"{either('save the number of the class', 'convert them with y.argmax(axis=1)')}"
    )


def _is_one_hot(labels: Array) -> bool:
    return labels.ndim == 2 and _is_binary(labels) and bool((labels.sum(axis=1) == 1).all())


def _is_binary(labels: Array) -> bool:
    return labels.dtype.kind in "buif" and bool(((labels == 0) | (labels == 1)).all())


def _as_classes(labels: Array) -> str:
    column = "" if labels.ndim == 1 else "[:, 0]"
    if labels.ndim == 2 and labels.shape[1] > 1 and _is_one_hot(labels):
        return f"for classes {either('save the number of each class', 'convert them with y.argmax(axis=1)')}"
    if labels.ndim > 1 and labels.shape[1:] != (1,):
        return ""
    whole = labels.dtype.kind in "buiUS" or (labels.dtype.kind == "f" and bool((np.floor(labels) == labels).all()))
    if not whole:
        return ""
    if not column:
        return f"for classes add {for_classes()}"
    if labels.dtype.kind == "f":
        return f"for classes {either('save one column of whole numbers', f'convert them with y{column}.astype(int)')}"
    return f"for classes {either('save one column', 'give one column, y[:, 0]')}"


def _as_numbers(labels: Array) -> str:
    if labels.dtype.kind in "US":
        try:
            labels.astype(float)
        except ValueError:
            return ""
    if labels.dtype.kind in "US":
        return (
            f"for numbers {either('save them as numbers', 'convert them with y.astype(float)')} and add {for_numbers()}"
        )
    if labels.dtype.kind not in "buif":
        return ""
    if labels.ndim > 2:
        flat = either("save them as one row per sample", "give y.reshape(len(y), -1)")
        return f"for numbers {flat} and add {for_numbers()}"
    return f"for numbers add {for_numbers()}"


def _as_sets(labels: Array) -> str:
    return f"for sets add {for_sets()}" if labels.ndim < 3 and _is_binary(labels) else ""
