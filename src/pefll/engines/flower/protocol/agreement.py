"""What server and clients must agree on before a single number crosses: the method, the model, what samples look like.

It travels in the Flower app's run config, and its SHA-256 in every message: a client that was set up for something else
refuses to work instead of sending numbers that mean something different.
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
from pefll.data.federation import Normalise
from pefll.engines.memory import CLIENT_NETWORKS, MemoryPlan, check_fits, check_model_fits, networks_of, sample_values
from pefll.methods import build_method, hyperparameters, typed_settings
from pefll.methods.contract import Method, Problem
from pefll.models import MODELS, Network, build_model, weights_of
from pefll.models.spec import ModelSpec
from pefll.version import __version__

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
# These keys of a run config hold JSON, since a run config knows only single values.
_JSON_KEYS = ("settings", "input_shape", "normalise", "class_names", "feature_names")
_JSON_LENGTH, _JSON_DEPTH = 1 << 22, 32  # clients get these texts from a server


class TooLarge(PefllError):
    """What is agreed on needs more memory than there is."""


@dataclass(frozen=True)
class Agreement:
    """What both sides must have the same of.

    Attributes:
        method: a key of METHODS, or package.module:Class where that is installed on both sides.
        settings: the method's hyper-parameters that differ from its defaults.
        model: what clients run, by name; never "auto".
        input_shape: of one sample.
        classes: how many.
        num_clients: how many take part in training; networks of some methods are made for so many.
        seed: of everything random.
        precision: float32 or float64.
        tokens: whether samples are tokens.
        normalise: of uint8 pixels, as [mean of each channel, standard deviation of each channel]; None for others.
        class_names: one per class, or empty.
        feature_names: one per column of a table, or empty.
        dataset: what the data is called in records.
        version: of this package.
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
    dataset: str = "federation"
    version: str = __version__

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.num_clients < 1:
            raise PefllError("a federation needs at least one client", code="PEFLL-F430")

    @cached_property
    def sha256(self) -> str:
        """A fingerprint: equal where both sides would compute the same."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and inputs."""
        return PRECISIONS[self.precision]

    def build(self) -> Method[Any]:
        """Return the method, with its model.

        Raises:
            TooLarge: where a client of it needs more memory than this machine has left.
        """
        return _built(json.dumps(self.to_config()))

    def to_config(self) -> dict[str, str | int | bool]:
        """Return it as a Flower run config takes it: a flat table of texts, whole numbers and truths."""
        plain = asdict(self)
        return {
            key.replace("_", "-"): json.dumps(value, ensure_ascii=False) if key in _JSON_KEYS else value
            for key, value in plain.items()
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Agreement:
        """Read it from a Flower run config, whose other keys are left alone."""
        try:
            given = {name: config[name.replace("_", "-")] for name in cls.__dataclass_fields__}
        except KeyError as error:
            raise PefllError(
                f"the run config has no {error.args[0]}; `pefll flower init` writes all of them", code="PEFLL-F411"
            ) from None
        try:
            return _read(**given)
        except TypeError as error:  # a value that is no single one
            raise bad_run_config(error) from None

    @classmethod
    def _from_values(cls, given: dict[str, Any]) -> Agreement:
        try:
            given |= {name: read_json_value(given[name], name) for name in _JSON_KEYS}
            for name in ("method", "model", "precision", "dataset", "version"):
                text(given[name], name)
            whole_number(given["seed"], "seed")
            whole_number(given["num_clients"], "num_clients", 1)
            ModelSpec.from_facts(given)
            if not isinstance(given["settings"], dict):
                raise ValueError("its settings are not a table of names and values")
        except (PefllError, ValueError) as error:
            raise bad_run_config(error) from None
        for name in ("input_shape", "class_names", "feature_names"):
            given[name] = tuple(given[name])
        if given["normalise"] is not None:
            given["normalise"] = Normalise(*(tuple(map(float, part)) for part in given["normalise"]))
        return cls(**given)


def read_json_value(value: Any, name: str) -> Any:
    """Return what a key of a run config holds as JSON; ValueError where it is none, too long or too deep.

    Args:
        value: of the key.
        name: of the key, for the sentence.
    """
    if not isinstance(value, str):
        raise ValueError(f"its {name} is {shown(value)} instead of JSON")
    if len(value) > _JSON_LENGTH:
        raise ValueError(f"its {name} has {len(value):,} characters, where {_JSON_LENGTH:,} are the most")
    try:
        return parse_json(value, _JSON_DEPTH)
    except ValueError as error:
        raise ValueError(f"its {name} is not JSON ({first_line(error)})") from None


def bad_run_config(reason: BaseException) -> PefllError:
    """Return the error for a run config that makes no sense."""
    words = reason.args[0] if isinstance(reason, PefllError) else first_line(reason)
    return PefllError(
        f"the run config of the Flower app is damaged: {words}; `pefll flower init` writes a good one", "PEFLL-F211"
    )


# A client gets the same run config with every message.
@lru_cache(maxsize=4, typed=True)
def _read(**given: str | int | bool) -> Agreement:
    return Agreement._from_values(dict(given))


@lru_cache(maxsize=4)
def _built(config: str) -> Method[Any]:
    """Build a method once in a process: it has no state, and a hypernetwork takes long to make."""
    agreed = Agreement.from_config(json.loads(config))
    with _as_too_large():
        if agreed.model in MODELS:  # weighed before it is made
            weights = weights_of(agreed.model, agreed.input_shape, agreed.classes)
            check_model_fits(f"the model {agreed.model}", sum(value.numel() for value in weights.values()))
    network = Network(build_model(agreed.model, agreed.input_shape, agreed.classes))
    problem = Problem(network, agreed.input_shape, agreed.classes, agreed.num_clients, agreed.tokens)
    with _as_too_large():
        check_fits(_plan(agreed, problem), agreed.method)
    return build_method(agreed.method, problem, agreed.settings)


def _plan(agreed: Agreement, problem: Problem) -> MemoryPlan:
    """Return, in numbers, what one client of an agreement does."""
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
    """Raise TooLarge for what does not fit, and for sizes that torch cannot even count."""
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
