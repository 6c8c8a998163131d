"""One file per method, named after its paper; no method knows another, but a variation knows what it varies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pefll.errors import PefllError, unknown
from pefll.methods.contract import Method, Problem
from pefll.methods.fedavg import FedAvg
from pefll.methods.fedrep import FedRep
from pefll.methods.knn_per import KNNPer
from pefll.methods.local import Local
from pefll.methods.pefll import PeFLL
from pefll.methods.pefll_prior import PeFLLPrior
from pefll.methods.per_fedavg import PerFedAvg
from pefll.methods.pfedhn import PFedHN
from pefll.methods.pfedme import PFedMe
from pefll.named import import_name

__all__ = [
    "METHODS",
    "FedAvg",
    "FedRep",
    "KNNPer",
    "Local",
    "PFedHN",
    "PFedMe",
    "PeFLL",
    "PeFLLPrior",
    "PerFedAvg",
    "Problem",
    "build_method",
    "hyperparameters",
    "method_class",
    "typed_settings",
]

METHODS: dict[str, Callable[..., Method[Any]]] = {
    "pefll": PeFLL,
    "pefll-prior": PeFLLPrior,
    "pfedhn": PFedHN,
    "knn-per": KNNPer,
    "pfedme": PFedMe,
    "fedrep": FedRep,
    "per-fedavg": PerFedAvg,
    "fedavg": FedAvg,
    "local": Local,
}


def method_class(name: str) -> Callable[..., Method[Any]]:
    """Return the class of a method: a key of METHODS, or `"package.module:Class"`."""
    if ":" in name:
        return import_name(name, "method")  # type: ignore[no-any-return]
    if name not in METHODS:
        raise unknown("method", name, [*METHODS, "your.module:Class"])
    return METHODS[name]


def hyperparameters(name: str) -> dict[str, Any]:
    """Return the names and defaults of a method's hyper-parameters."""
    kind = method_class(name)
    if not dataclasses.is_dataclass(kind):
        raise PefllError(f"{name} is not a dataclass; see pefll.methods.contract.Method for what a method is")
    fields = dataclasses.fields(kind)
    return {field.name: field.default for field in fields if field.name != "problem"}


def build_method(name: str, problem: Problem, settings: dict[str, Any]) -> Method[Any]:
    """Return a method with the given hyper-parameters; the others keep their defaults.

    Args:
        name: a key of METHODS, or `"package.module:Class"`.
        problem: what there is to learn.
        settings: values, or strings that are read as the default's type.
    """
    return method_class(name)(problem=problem, **typed_settings(name, settings))


def typed_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with the types of their defaults, or raise PefllError for one that does not exist."""
    defaults = hyperparameters(name)
    for key in settings:
        if key not in defaults:
            raise unknown(f"hyper-parameter of {name}", key, defaults)
    return {key: _as_type_of(defaults[key], value, f"{name}: {key}") for key, value in settings.items()}


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _as_type_of(default: Any, value: Any, what: str) -> Any:
    kind = type(default)
    if kind is bool:
        if str(value).lower() not in _TRUTHS:
            raise PefllError(f"{what} must be true or false, not {value!r}")
        return _TRUTHS[str(value).lower()]
    try:
        converted = kind(value)
    except (TypeError, ValueError) as error:
        raise PefllError(f"{what} must be {kind.__name__}, not {value!r}") from error
    if kind in (int, float) and (converted < 0 or converted != converted or float(converted) != float(value)):
        raise PefllError(f"{what} must be a non-negative {kind.__name__}, not {value!r}")
    return converted
