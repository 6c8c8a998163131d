"""What the facts of runs and models must look like. They come from files, which may be damaged or a stranger's."""

from __future__ import annotations

import math
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.models import MODELS

# Sizes above this are nobody's data; products of them stay exact.
MOST = 1 << 31
AXES = 8  # of a sample, at most


def parse_facts(text: str) -> Any:
    """Return facts from JSON; None where it is none."""
    try:
        return parse_json(text.encode())
    except ValueError:
        return None


def check_problem(problem: Any, where: object) -> None:
    """Raise PefllError where a checkpoint's facts do not say what its run learns.

    Args:
        problem: a model's facts, with the number of clients and what the model is known by.
        where: the run, for the sentence.
    """
    fault = fault_of(problem)
    if not fault and not _is_size(problem.get("num_clients")):
        fault = "its num_clients is no number of clients"
    # By these two a model is known again; earlier versions wrote neither.
    if not fault and not (_is_size(problem.get("weights", 1)) and _is_probe(problem.get("probe") or [])):
        fault = "its weights or its probe make no sense"
    if fault:
        raise PefllError(
            f"the newest checkpoint of {where} is damaged: {fault}; put back the one that was there", code="PEFLL-R020"
        )


def fault_of(facts: Any) -> str:
    """Return what is wrong with a model's facts, in a few words; nothing where they make sense.

    Args:
        facts: see `PersonalModel.facts`.
    """
    if not isinstance(facts, dict):
        return "its facts are not a table of names and values"
    needed = ("model", "input_shape", "classes", "normalise", "tokens", "class_names")
    missing = [name for name in needed if name not in facts]
    if missing:
        return f"its facts have no {missing[0]}"
    shape, classes, names = facts["input_shape"], facts["classes"], facts["class_names"]
    features = facts.get("feature_names", [])  # which files of earlier versions do not have
    if not isinstance(facts["model"], str) or not isinstance(facts["tokens"], bool):
        return "its model or its tokens make no sense"
    if not isinstance(shape, list) or not 1 <= len(shape) <= AXES or not all(map(_is_size, shape)):
        return "its input_shape is no list of sizes"
    if math.prod(shape) > MOST or not _is_size(classes):
        return f"its samples have the shape {shape} and its classes are {classes!r}, which is too much or nothing"
    if not _is_texts(names) or len(names) not in (0, classes):
        return "its class_names are not one for each class"
    if not _is_texts(features) or len(set(features)) < len(features) or (features and shape != [len(features)]):
        return "its feature_names are not one for each column"
    if not _is_texts([facts.get(name, "") for name in ("label_column", "client_column")]):
        return "the names of its columns are no texts"
    return _fault_of_use(facts)


def _fault_of_use(facts: dict[str, Any]) -> str:
    """Return what is wrong with how a model is used, where its facts have the right types."""
    shape, model, neighbours = facts["input_shape"], facts["model"], facts.get("neighbours")
    if facts["normalise"] is not None and (facts["tokens"] or not _is_normalise(facts["normalise"], shape[0])):
        return "its normalise is not one mean and one deviation above 0 for each channel"
    if model in MODELS and (model == "lstm") != facts["tokens"]:
        return f"its model {model} and its tokens, {facts['tokens']}, do not go together"
    if model == "lstm" and len(shape) != 1:
        return f"its model takes texts, and not samples of shape {shape}"
    if neighbours is not None and not _is_neighbours(neighbours, facts["classes"]):
        return "its neighbours make no sense"
    return ""


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _is_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # neither NaN nor what float32 cannot hold


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
    return fits and 0 <= weight <= 1.001 and scale > 0  # a share is rounded in float32
