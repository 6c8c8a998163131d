"""The agreement between server and clients: the method, the model, and the type of the samples.

The agreement is in the Flower app's run config, and its SHA-256 is in every message. A client with another agreement
refuses to work. Otherwise it would send numbers with another meaning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from pefll.core.arguments import shown, text, whole_number
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.files import parse_json
from pefll.core.wording import counted
from pefll.data.arrays import blank_labels
from pefll.data.samples import Array, Normalise
from pefll.data.table_plan import TablePlan, plan_of
from pefll.engines.memory import CLIENT_NETWORKS, MemoryPlan, check_fits, check_model_fits, networks_of, sample_values
from pefll.methods import build_method, hyperparameters, typed_settings
from pefll.methods.contract import Method, Problem
from pefll.models import MODELS, Network, build_model, weights_of
from pefll.models.spec import ModelSpec
from pefll.tasks import Classification
from pefll.tasks.names import labels_for, task_of
from pefll.version import __version__

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
# The values of these keys are JSON texts, because a run config can have no lists and tables.
_JSON_KEYS = ("settings", "input_shape", "normalise", "class_names", "feature_names", "table")
# Settings that earlier run configs lack.
_LATER: dict[str, Any] = {"learns": "", "label_columns": 0, "table": "null"}
_JSON_LENGTH, _JSON_DEPTH = 1 << 22, 32  # limits, because a server that clients do not trust sends these texts


class TooLarge(PefllError):
    """The networks of an agreement need more memory than is free."""


@dataclass(frozen=True)
class Agreement:
    """Settings that are the same on the server and on every client.

    Attributes:
        method: a key of METHODS, or package.module:Class if server and clients have it installed.
        settings: the method's hyper-parameters that differ from its defaults.
        model: name of the clients' model; never "auto".
        input_shape: shape of one sample.
        num_clients: number of clients that train; some methods' networks depend on it.
        precision: float32 or float64.
        normalise: means and standard deviations of the channels of uint8 pixels; None for other samples.
        class_names: one per class, or empty.
        feature_names: one per column of a table, or empty.
        table: what every client does to the columns of its table, as JSON; None for no table. See `data.columns`.
        dataset: name of the data in records.
        version: version of this package.
        learns: the task with its settings, as text; "" for plain classification.
        label_columns: number of columns of labels [N, k]; 0 for labels [N].
    """

    method: str
    model: str
    input_shape: tuple[int, ...]
    classes: int
    num_clients: int
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    precision: str = "float32"
    tokens: bool = False
    normalise: Normalise | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    table: dict[str, Any] | None = None
    dataset: str = "federation"
    version: str = __version__
    learns: str = ""
    label_columns: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.num_clients < 1:
            raise PefllError("a federation needs at least one client", code="PEFLL-F430")

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the agreement. If it is equal on two machines, both compute the same."""
        # Later settings count only if they are used, so that earlier federations keep their fingerprint.
        used = {name: value for name, value in asdict(self).items() if value or name not in _LATER}
        return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()

    @property
    def plan(self) -> TablePlan | None:
        """What every client does to the columns of its table; None for no table."""
        return plan_of(self.table, self.input_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and inputs."""
        return PRECISIONS[self.precision]

    @property
    def labels(self) -> str:
        """What labels are: classes, numbers or sets."""
        return "classes" if self.classes else labels_for(self.learns)

    def blank_labels(self, samples: int) -> Array:
        """Return made-up labels of the right shape and type."""
        return blank_labels(self.labels, samples, self.label_columns or None)

    def build(self) -> Method[Any]:
        """Return the method with its model; TooLarge if one client needs more memory than is free on this machine."""
        return _built(json.dumps(self.to_config()))

    def to_config(self) -> dict[str, str | int | bool]:
        """Return the agreement as part of a Flower run config: a flat table of texts, integers and booleans."""
        return {
            key.replace("_", "-"): json.dumps(value, ensure_ascii=False) if key in _JSON_KEYS else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Agreement:
        """Read an agreement from a Flower run config, which may have more keys."""
        later = {name.replace("_", "-"): default for name, default in _LATER.items()}
        given = {name: config_value(later | dict(config), name) for name in cls.__dataclass_fields__}
        try:
            return _read(**given)
        except TypeError as error:  # a value is a list or a table, which `lru_cache` cannot hash
            raise bad_run_config(error) from None


def config_value(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field in a run config; PefllError if it is missing."""
    key = name.replace("_", "-")
    if key not in config:
        raise PefllError(f"the run config has no {key}; `pefll flower init` writes all of them", code="PEFLL-F411")
    return config[key]


def read_json_value(value: Any, name: str) -> Any:
    """Parse the JSON text of a run config's key `name`; ValueError if it is invalid, too long or nested too deeply."""
    if not isinstance(value, str):
        raise ValueError(f"its {name} is {shown(value)} instead of JSON")
    if len(value) > _JSON_LENGTH:
        raise ValueError(f"its {name} has {len(value):,} characters, but at most {_JSON_LENGTH:,} are allowed")
    try:
        return parse_json(value, _JSON_DEPTH)
    except ValueError as error:
        raise ValueError(f"its {name} is not JSON ({first_line(error)})") from None


def bad_run_config(reason: BaseException) -> PefllError:
    """Return the error for an invalid run config."""
    words = reason.args[0] if isinstance(reason, PefllError) else first_line(reason)
    return PefllError(
        f"the run config of the Flower app is damaged: {words}; `pefll flower init` writes a good one", "PEFLL-F211"
    )


@lru_cache(maxsize=4, typed=True)  # because a client gets the same run config with every message
def _read(**given: Any) -> Agreement:
    try:
        given |= {name: read_json_value(given[name], name) for name in _JSON_KEYS}
        for name in ("method", "model", "precision", "dataset", "version", "learns"):
            text(given[name], name)
        whole_number(given["seed"], "seed")
        whole_number(given["num_clients"], "num_clients", 1)
        whole_number(given["label_columns"], "label_columns", 0)
        of_task = {"task": given["learns"] or None, "outputs": None if given["classes"] else 1}
        of_task |= {"label_columns": given["label_columns"] or None}
        spec = ModelSpec.from_json(
            {name: value for name, value in (given | of_task).items() if value is not None or name != "table"}
        )
        plan_of(spec.table, spec.input_shape)
        if not isinstance(given["settings"], dict):
            raise ValueError("its settings are not a table of names and values")
    except (PefllError, ValueError) as error:
        raise bad_run_config(error) from None
    given |= {name: getattr(spec, name) for name in ("input_shape", "class_names", "feature_names")}
    return Agreement(**given | {"normalise": Normalise(*spec.normalise) if spec.normalise else None})


@lru_cache(maxsize=4)
def _built(config: str) -> Method[Any]:
    """Build a method once per process. A method has no state, and building a hypernetwork takes long."""
    agreed = Agreement.from_config(json.loads(config))
    task = task_of(agreed.learns) if agreed.learns else Classification(agreed.classes)
    # A user's own task may have another number of outputs than there are classes.
    outputs = agreed.classes if isinstance(task, Classification) else task.outputs
    if (task.labels == "classes") != bool(agreed.classes) or not task.outputs == outputs > 0:
        raise PefllError(
            f"the run config says {agreed.learns or 'classification'!r} with {counted(agreed.classes, 'class')} and "
            f"{counted(task.outputs, 'output')}; `pefll flower init` writes a good one",
            code="PEFLL-F500",
        )
    with _as_too_large():
        if agreed.model in MODELS:  # for these, the memory is checked before the model is built
            weights = weights_of(agreed.model, agreed.input_shape, task.outputs)
            check_model_fits(f"the model {agreed.model}", sum(value.numel() for value in weights.values()))
    network = Network(build_model(agreed.model, agreed.input_shape, task.outputs))
    problem = Problem(network, agreed.input_shape, agreed.classes, agreed.num_clients, agreed.tokens, task)
    with _as_too_large():
        check_fits(_plan(agreed, problem), agreed.method)
    return build_method(agreed.method, problem, agreed.settings)


def _plan(agreed: Agreement, problem: Problem) -> MemoryPlan:
    """Return the sizes that decide how much memory one client of an agreement needs."""
    settings = {**hyperparameters(agreed.method), **typed_settings(agreed.method, agreed.settings)}
    return MemoryPlan(
        weights=problem.model.size,
        networks=networks_of(lambda: build_method(agreed.method, problem, agreed.settings)),
        clients=1,
        round_clients=1,
        steps=int(settings.get("local_steps") or 1),
        batch=int(settings.get("batch_size") or 1),
        values=sample_values(problem),
        copies=CLIENT_NETWORKS,
    )


@contextmanager
def _as_too_large() -> Iterator[None]:
    """Raise TooLarge for networks that do not fit in memory, and for sizes that overflow torch's integers."""
    try:
        yield
    except PefllError as error:
        if error.code in ("PEFLL-L006", "PEFLL-L007", "PEFLL-L008"):
            raise TooLarge(error.args[0], error.code) from None
        raise
    except (RuntimeError, OverflowError) as error:
        raise TooLarge(
            f"the networks cannot be built: {first_line(error)}; choose smaller sizes", code="PEFLL-F201"
        ) from None
