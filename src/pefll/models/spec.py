"""Inputs and outputs of a model, read from files that may be damaged or come from a stranger."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.models import MODELS

# The largest size of an axis. It is small enough for exact products of sizes.
MOST = 1 << 31
AXES = 8  # most axes of a sample


@dataclass(frozen=True)
class ModelSpec:
    """Checked inputs and outputs of a model. In files they are part of a JSON object, the "facts"."""

    model: str  # a key of `MODELS`, "package.module:function", or "" for a module given in Python
    input_shape: tuple[int, ...]  # shape of one sample
    classes: int
    normalise: tuple[tuple[float, ...], ...] | None  # mean and standard deviation per channel of uint8 pixels
    tokens: bool
    class_names: tuple[str, ...]  # one name per class, or empty
    feature_names: tuple[str, ...]  # one name per column of a table, or empty
    label_column: str  # name of a table's column of labels, or empty
    client_column: str  # name of a table's column of clients, or empty
    neighbours: dict[str, Any] | None  # settings of a `NeighbourModel`

    @classmethod
    def from_facts(cls, facts: Any) -> ModelSpec:
        """Return the spec in the facts of a file; ValueError says in a few words what is wrong with the facts."""
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a table of names and values")
        for name in ("model", "input_shape", "classes", "normalise", "tokens", "class_names"):
            if name not in facts:
                raise ValueError(f"its facts have no {name}")
        # Files of earlier versions lack these keys.
        facts = {"feature_names": [], "label_column": "", "client_column": "", "neighbours": None} | facts
        model, shape, classes, tokens = (facts[name] for name in ("model", "input_shape", "classes", "tokens"))
        features, normalise, neighbours = (facts[name] for name in ("feature_names", "normalise", "neighbours"))
        if not isinstance(model, str) or not isinstance(tokens, bool):
            raise ValueError("its model is not a text, or its tokens is not true or false")
        if not _is_list_of(shape, _is_size) or not 1 <= len(shape) <= AXES:
            raise ValueError("its input_shape is not a list of sizes")
        if math.prod(shape) > MOST or not _is_size(classes):
            raise ValueError(f"its input_shape {shape} or its number of classes {classes!r} is out of range")
        if not _is_list_of(facts["class_names"], _is_text) or len(facts["class_names"]) not in (0, classes):
            raise ValueError("its class_names are not one for each class")
        distinct = _is_list_of(features, _is_text) and len(set(features)) == len(features)
        if not distinct or (features and shape != [len(features)]):
            raise ValueError("its feature_names are not one for each column")
        if not _is_text(facts["label_column"]) or not _is_text(facts["client_column"]):
            raise ValueError("its label_column or its client_column is not a text")
        if normalise is not None and (tokens or not _is_normalise(normalise, shape[0])):
            raise ValueError("its normalise is not one mean and one deviation above 0 for each channel")
        if model in MODELS and (model == "lstm") != tokens:
            raise ValueError(f"its model is {model}, but its tokens is {tokens}")
        if model == "lstm" and len(shape) != 1:
            raise ValueError(f"its model takes texts, not samples of shape {shape}")
        if neighbours is not None and not _is_neighbours(neighbours, classes):
            raise ValueError("its neighbours are not settings of a neighbour model")
        values = {field.name: facts[field.name] for field in fields(cls)}
        for name in ("input_shape", "class_names", "feature_names"):
            values[name] = tuple(values[name])
        if normalise is not None:
            values["normalise"] = tuple(map(tuple, normalise))
        return cls(**values)


def parse_facts(text: str) -> Any:
    """Return facts from JSON; None for a text that is not JSON."""
    try:
        return parse_json(text.encode())
    except ValueError:
        return None


def check_problem(problem: Any, where: object) -> None:
    """Raise PefllError if `problem`, the facts in a checkpoint of the run `where`, is damaged."""
    try:
        ModelSpec.from_facts(problem)
        if not _is_size(problem.get("num_clients")):
            raise ValueError("its num_clients is not a number of clients")
        # Checkpoints of earlier versions have neither weights nor probe.
        if not _is_size(problem.get("weights", 1)) or not _is_probe(problem.get("probe") or []):
            raise ValueError("its weights or its probe are not numbers")
    except ValueError as error:
        raise PefllError(
            f"the newest checkpoint of {where} is damaged: {error}; restore it from a copy", code="PEFLL-R020"
        ) from None


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(values: Any, is_member: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(is_member, values))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # not NaN, and within float32


def _is_probe(rows: Any) -> bool:
    if not isinstance(rows, list) or len(rows) not in (0, 2) or not all(isinstance(row, list) for row in rows):
        return False
    return all(score is None or (type(score) is float and math.isfinite(score)) for row in rows for score in row)


def _is_normalise(value: Any, channels: int) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    right = all(_is_list_of(part, _is_number) and len(part) == channels for part in value)
    return right and all(deviation > 1e-30 for deviation in value[1])


def _is_neighbours(value: Any, classes: int) -> bool:
    if not isinstance(value, dict) or not {"count", "weight", "scale", "classes"} <= set(value):
        return False
    count, weight, scale = value["count"], value["weight"], value["scale"]
    fits = _is_size(count) and _is_number(weight) and _is_number(scale) and value["classes"] == classes
    return fits and 0 <= weight <= 1.001 and scale > 0  # the weight may be rounded in float32
