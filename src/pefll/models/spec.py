"""The spec of a model: its input, output and origin, read from files that may be damaged or come from a stranger."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.models import MODELS
from pefll.models.check import alike

# The largest size of an axis. It is small enough for exact products of sizes.
MOST = 1 << 31
AXES = 8  # most axes of a sample
_LONG_PROBE = 100  # most numbers of an own network's probe
MOST_TASK = 1 << 20  # most characters of a task


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The input, output and origin of a model. Checkpoints and personal models' files hold it as a JSON object."""

    model: str  # a key of `MODELS`, "package.module:function", or "" for a module given in Python
    input_shape: tuple[int, ...]  # shape of one sample
    classes: int  # number of classes; 0 if labels are not classes
    normalise: tuple[tuple[float, ...], tuple[float, ...]] | None  # means and deviations of the channels of pixels
    tokens: bool  # whether samples are tokens of text
    class_names: tuple[str, ...]  # one per class, or per column of labels that are not classes, or empty
    feature_names: tuple[str, ...] = ()  # one per column of a table, or empty
    label_column: str | None = None  # name of a table's column of labels; "" for other data, None if unknown
    client_column: str | None = None  # name of a table's column of clients; "" for other data, None if unknown
    num_clients: int  # number of clients in the federation
    dataset: str = ""  # name of the training data
    weights: int | None = None  # number of weights; None in files of earlier versions
    # See `models.check.probe`; None in files of earlier versions. Its numbers mean nothing to a reader.
    probe: list[list[float | None]] | None = field(default=None, repr=False)
    neighbours: dict[str, Any] | None = None  # settings of a `NeighbourModel`
    networks: dict[str, list[float]] | None = None  # probes of a user's own embedding network and hypernetwork
    # What was done to each column of a table, see `data.table_plan.TablePlan`. `plan_of` there checks and reads it.
    table: dict[str, Any] | None = field(default=None, repr=False)
    task: str | None = None  # the task with its settings, as text; None for plain classification
    outputs: int | None = None  # number of outputs per sample; None for one per class
    time_column: str | None = None  # name of a table's column of times; "" for none, None if unknown
    label_columns: int | None = None  # number of columns of labels [N, k]; None for labels [N]
    made_from: str | None = None  # hash of the run and the samples that a model in a folder of models is made from
    client: str | None = None  # name of the client whose model it is; None if unknown
    certificate: str | None = None  # what the run promises about new clients, in half a sentence

    @property
    def width(self) -> int:
        """Number of the model's outputs per sample."""
        return self.outputs or self.classes

    @property
    def named_classes(self) -> tuple[str, ...]:
        """The names of the classes; empty if labels are not classes, or if classes have no names."""
        return self.class_names if self.classes else ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for a file. It has no entry for None, except for `normalise`."""
        return {name: value for name, value in vars(self).items() if value is not None or name == "normalise"}

    @classmethod
    def from_json(cls, content: Any) -> ModelSpec:
        """Return the spec in a file's JSON object; ValueError says in a few words what is wrong with it."""
        if not isinstance(content, dict):
            raise ValueError("its spec is not a table of names and values")
        for one in fields(cls):
            if one.default is MISSING and one.name not in content:
                raise ValueError(f"its spec has no {one.name}")
        values = {one.name: content[one.name] for one in fields(cls) if one.name in content}
        model, shape, classes, tokens = (values[name] for name in ("model", "input_shape", "classes", "tokens"))
        features, normalise, neighbours = values.get("feature_names", []), values["normalise"], values.get("neighbours")
        if not isinstance(model, str) or not isinstance(tokens, bool):
            raise ValueError("its model is not a text, or its tokens is not true or false")
        if not _is_list_of(shape, _is_size) or not 1 <= len(shape) <= AXES:
            raise ValueError("its input_shape is not a list of sizes")
        outputs, task = values.get("outputs"), values.get("task")
        without_classes = classes == 0 and type(classes) is int and _is_size(outputs) and bool(task)
        if math.prod(shape) > MOST or not (_is_size(classes) or without_classes):
            raise ValueError(f"its input_shape {shape} or its number of classes {classes!r} is out of range")
        if not _is_list_of(values["class_names"], _is_text) or not (
            without_classes or len(values["class_names"]) in (0, classes)
        ):
            raise ValueError("its class_names are not one for each class")
        distinct = _is_list_of(features, _is_text) and len(set(features)) == len(features)
        if not distinct or (features and shape != [len(features)]):
            raise ValueError("its feature_names are not one for each column")
        for name, is_right in _OTHER_CHECKS.items():
            if name in values and not is_right(values[name]):
                raise ValueError(f"its {name} makes no sense")
        if normalise is not None and (tokens or not _is_normalise(normalise, shape[0])):
            raise ValueError("its normalise is not one mean and one deviation above 0 for each channel")
        if model in MODELS and (model == "lstm") != tokens:
            raise ValueError(f"its model is {model}, but its tokens is {tokens}")
        if model == "lstm" and len(shape) != 1:
            raise ValueError(f"its model takes texts, not samples of shape {shape}")
        if neighbours is not None and not _is_neighbours(neighbours, classes):
            raise ValueError("its neighbours are not settings of a neighbour model")
        values |= {"input_shape": tuple(shape), "class_names": tuple(values["class_names"])}
        values |= {"feature_names": tuple(features)}  # files of the first versions have none
        if normalise is not None:
            values["normalise"] = tuple(tuple(map(float, part)) for part in normalise)
        return cls(**values)


def spec_of_checkpoint(metadata: dict[str, Any], where: object) -> ModelSpec:
    """Return the spec in the metadata of the newest checkpoint of the run `where`; PefllError if it is damaged."""
    try:
        return ModelSpec.from_json(metadata.get("problem"))
    except ValueError as error:
        raise PefllError(
            f"the newest checkpoint of {where} is damaged: {error}; restore it from a copy", code="PEFLL-R020"
        ) from None


def check_same_model(trained: ModelSpec, found: ModelSpec, where: str) -> None:
    """Raise PefllError if a model differs from the one that a run was trained with.

    Args:
        trained: spec of the run's model. A run of an earlier version passes: its spec has no weights and no probe.
        found: spec of the given model.
        where: name of the run.
    """
    if not trained.probe or not found.probe or trained.weights is None:
        return
    if trained.weights != found.weights:
        raise PefllError(
            f"the model of {where} has {trained.weights:,} weights, but yours has {found.weights:,}; pass the same "
            "model",
            code="PEFLL-N026",
        )
    rows = zip(found.probe, trained.probe, strict=True)
    if not all(alike(_row_tensor(row), _row_tensor(wanted)) for row, wanted in rows):
        raise PefllError(
            f"with the same weights, your model gives other scores than the model of {where}; pass the same layers, "
            "buffers and frozen parameters, and fix the seed if they are random",
            code="PEFLL-N027",
        )
    for name, probed in (found.networks or {}).items():
        wanted = (trained.networks or {}).get(name)
        if wanted and not (len(wanted) == len(probed) and alike(torch.tensor(probed), torch.tensor(wanted))):
            raise PefllError(
                f"your {name} is another network than that of {where}: it has other layers, buffers or frozen "
                "parameters; pass the same",
                code="PEFLL-N547",
            )


def _row_tensor(row: list[float | None]) -> Tensor:
    return torch.tensor([math.nan if score is None else score for score in row])


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


def _are_networks(probes: Any) -> bool:
    if not isinstance(probes, dict):
        return False
    return all(
        isinstance(row, list) and len(row) <= _LONG_PROBE and all(map(_is_number, row)) for row in probes.values()
    )


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


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


_OTHER_CHECKS = {
    **dict.fromkeys(
        ("label_column", "client_column", "time_column", "dataset", "made_from", "client", "certificate"), _is_text
    ),
    **dict.fromkeys(("num_clients", "weights"), _is_size),
    **dict.fromkeys(("outputs", "label_columns"), lambda value: value is None or _is_size(value)),
    "task": lambda value: value is None or (_is_text(value) and len(value) <= MOST_TASK),
    "probe": _is_probe,
    "networks": _are_networks,
    "table": _is_table,
}
