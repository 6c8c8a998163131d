"""What a model takes and returns, read from files that may be damaged or come from a stranger."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.models import MODELS

# The largest size of an axis; products of sizes stay exact.
MOST = 1 << 31
AXES = 8  # of a sample, at most


@dataclass(frozen=True)
class ModelSpec:
    """What a model takes and returns, checked. Files hold it as a JSON object with further keys, the "facts".

    Attributes:
        model: a key of `MODELS`, `"package.module:function"`, or "" for a module given in Python.
        input_shape: of one sample.
        classes: the number of classes.
        normalise: mean and standard deviation per channel for uint8 pixels, or None.
        tokens: whether samples are tokens.
        class_names: one per class, or empty.
        feature_names: one per column of a table, or empty.
        label_column: the table's column of labels, or empty.
        client_column: the table's column of clients, or empty.
        neighbours: settings of a `NeighbourModel`, or None.
    """

    model: str
    input_shape: tuple[int, ...]
    classes: int
    normalise: tuple[tuple[float, ...], ...] | None
    tokens: bool
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    label_column: str
    client_column: str
    neighbours: dict[str, Any] | None

    @classmethod
    def from_facts(cls, facts: Any) -> ModelSpec:
        """Return the spec that facts hold; ValueError says in a few words what is wrong with them."""
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a table of names and values")
        for name in ("model", "input_shape", "classes", "normalise", "tokens", "class_names"):
            if name not in facts:
                raise ValueError(f"its facts have no {name}")
        shape, classes, names = facts["input_shape"], facts["classes"], facts["class_names"]
        # Files of earlier versions do not have the names below.
        features = facts.get("feature_names", [])
        columns = [facts.get(name, "") for name in ("label_column", "client_column")]
        if not isinstance(facts["model"], str) or not isinstance(facts["tokens"], bool):
            raise ValueError("its model is not a text, or its tokens is not true or false")
        if not isinstance(shape, list) or not 1 <= len(shape) <= AXES or not all(map(_is_size, shape)):
            raise ValueError("its input_shape is not a list of sizes")
        if math.prod(shape) > MOST or not _is_size(classes):
            raise ValueError(f"its input_shape {shape} or its number of classes {classes!r} is out of range")
        if not _is_texts(names) or len(names) not in (0, classes):
            raise ValueError("its class_names are not one for each class")
        if not _is_texts(features) or len(set(features)) < len(features) or (features and shape != [len(features)]):
            raise ValueError("its feature_names are not one for each column")
        if not _is_texts(columns):
            raise ValueError("its label_column or its client_column is not a text")
        _check_use(facts)
        normalise = None if facts["normalise"] is None else tuple(tuple(part) for part in facts["normalise"])
        return cls(
            model=facts["model"],
            input_shape=tuple(shape),
            classes=classes,
            normalise=normalise,
            tokens=facts["tokens"],
            class_names=tuple(names),
            feature_names=tuple(features),
            label_column=columns[0],
            client_column=columns[1],
            neighbours=facts.get("neighbours"),
        )


def parse_facts(text: str) -> Any:
    """Return facts from JSON; None where the text is not JSON."""
    try:
        return parse_json(text.encode())
    except ValueError:
        return None


def check_problem(problem: Any, where: object) -> None:
    """Raise PefllError for a checkpoint with damaged facts about its run's model.

    Args:
        problem: facts with the number of clients, the number of weights and the probe.
        where: the run, for the error.
    """
    try:
        ModelSpec.from_facts(problem)
        if not _is_size(problem.get("num_clients")):
            raise ValueError("its num_clients is not a number of clients")
        # Earlier versions wrote neither weights nor probe.
        if not _is_size(problem.get("weights", 1)) or not _is_probe(problem.get("probe") or []):
            raise ValueError("its weights or its probe are not numbers")
    except ValueError as error:
        raise PefllError(
            f"the newest checkpoint of {where} is damaged: {error}; restore it from a copy", code="PEFLL-R020"
        ) from None


def _check_use(facts: dict[str, Any]) -> None:
    """Raise ValueError where facts of the right types contradict each other."""
    shape, model, neighbours = facts["input_shape"], facts["model"], facts.get("neighbours")
    if facts["normalise"] is not None and (facts["tokens"] or not _is_normalise(facts["normalise"], shape[0])):
        raise ValueError("its normalise is not one mean and one deviation above 0 for each channel")
    if model in MODELS and (model == "lstm") != facts["tokens"]:
        raise ValueError(f"its model is {model}, but its tokens is {facts['tokens']}")
    if model == "lstm" and len(shape) != 1:
        raise ValueError(f"its model takes texts, not samples of shape {shape}")
    if neighbours is not None and not _is_neighbours(neighbours, facts["classes"]):
        raise ValueError("its neighbours are not settings of a neighbour model")


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _is_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # not NaN, and within float32


def _is_probe(rows: Any) -> bool:
    if not isinstance(rows, list) or len(rows) not in (0, 2) or not all(isinstance(row, list) for row in rows):
        return False
    return all(score is None or (type(score) is float and math.isfinite(score)) for row in rows for score in row)


def _is_normalise(value: Any, channels: int) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    if not all(isinstance(part, list) and len(part) == channels and all(map(_is_number, part)) for part in value):
        return False
    return all(deviation > 1e-30 for deviation in value[1])


def _is_neighbours(value: Any, classes: int) -> bool:
    if not isinstance(value, dict) or not {"count", "weight", "scale", "classes"} <= set(value):
        return False
    count, weight, scale = value["count"], value["weight"], value["scale"]
    fits = _is_size(count) and _is_number(weight) and _is_number(scale) and value["classes"] == classes
    return fits and 0 <= weight <= 1.001 and scale > 0  # the weight may be rounded in float32
