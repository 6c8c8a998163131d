"""One file per method. A method imports another method only if it is a variation of that method."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pefll.core.arguments import MOST, plain, shown
from pefll.core.errors import PefllError, unknown
from pefll.core.plugins import import_name
from pefll.methods.apfl import APFL
from pefll.methods.contract import BaseMethod, Method, Problem
from pefll.methods.ditto import Ditto
from pefll.methods.fedavg import FedAvg
from pefll.methods.fedbabu import FedBABU
from pefll.methods.fedper import FedPer
from pefll.methods.fedprox import FedProx
from pefll.methods.fedrep import FedRep
from pefll.methods.knn_per import KNNPer
from pefll.methods.lg_fedavg import LGFedAvg
from pefll.methods.local import Local
from pefll.methods.odpfl_hn import ODPFLHN
from pefll.methods.pefll import PeFLL
from pefll.methods.pefll_plus import PeFLLPlus
from pefll.methods.pefll_prior import PeFLLPrior
from pefll.methods.per_fedavg import PerFedAvg
from pefll.methods.pfedhn import PFedHN
from pefll.methods.pfedme import PFedMe
from pefll.methods.scaffold import Scaffold
from pefll.models.own import is_given, name_of

__all__ = [
    "APFL",
    "METHODS",
    "ODPFLHN",
    "BaseMethod",
    "Ditto",
    "FedAvg",
    "FedBABU",
    "FedPer",
    "FedProx",
    "FedRep",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "PFedHN",
    "PFedMe",
    "PeFLL",
    "PeFLLPlus",
    "PeFLLPrior",
    "PerFedAvg",
    "Problem",
    "Scaffold",
    "build_method",
    "given_networks",
    "hyperparameters",
    "method_class",
    "method_name",
    "method_value",
    "network_settings",
    "personal_settings",
    "settings_for",
    "split_networks",
    "typed_settings",
    "with_networks",
]

METHODS: dict[str, Callable[..., Method[Any]]] = {
    "pefll": PeFLL,
    "pefll-prior": PeFLLPrior,
    "pefll-plus": PeFLLPlus,
    "odpfl-hn": ODPFLHN,
    "pfedhn": PFedHN,
    "knn-per": KNNPer,
    "pfedme": PFedMe,
    "ditto": Ditto,
    "apfl": APFL,
    "fedrep": FedRep,
    "fedper": FedPer,
    "lg-fedavg": LGFedAvg,
    "fedbabu": FedBABU,
    "per-fedavg": PerFedAvg,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "local": Local,
}


def method_name(method: Any) -> str:
    """Return a method's name: a key of METHODS, or `"package.module:Class"`.

    Args:
        method: a method's name, the name of a class in METHODS, or the class itself.

    Raises:
        PefllError: for anything else.
    """
    for name, kind in METHODS.items():
        if method is kind or (isinstance(method, str) and method == getattr(kind, "__name__", "")):
            return name
    given = plain(method)
    if isinstance(given, str):
        return given
    if dataclasses.is_dataclass(method) and isinstance(method, type):
        raise PefllError(
            f"the method {shown(method)} is not one of pefll.METHODS; name it as 'package.module:{method.__name__}'",
            code="PEFLL-A013",
        )
    raise PefllError(f"the method is {shown(method)}; it must be one of {', '.join(METHODS)}", code="PEFLL-A013")


def method_value(method: Any) -> tuple[Any, dict[str, Any]]:
    """Return a method's class or name, and the hyper-parameters that differ from their defaults.

    Args:
        method: a name, a class, or a value such as `PeFLL(client_lr=0.02)`.
    """
    if isinstance(method, type) or not isinstance(method, BaseMethod):
        return method, {}
    kind: Any = type(method)
    defaults = {each.name: each.default for each in dataclasses.fields(method)}
    settings = {name: getattr(method, name) for name in defaults if name != "bound_to"}
    name: Any = kind if any(kind is known for known in METHODS.values()) else f"{kind.__module__}:{kind.__qualname__}"
    return name, {key: value for key, value in settings.items() if value != defaults[key]}


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
        raise PefllError(
            f"{name} is not a dataclass; see pefll.methods.contract.Method for what a method is", code="PEFLL-S001"
        )
    fields = dataclasses.fields(kind)
    return {field.name: field.default for field in fields if field.name not in ("problem", "bound_to")}


def personal_settings(name: str) -> tuple[str, ...]:
    """Return the names of a method's hyper-parameters that may change after training. The first counts steps."""
    names: tuple[str, ...] = getattr(method_class(name), "personal_settings", ())
    return names


def network_settings(name: str) -> tuple[str, ...]:
    """Return the names of a method's hyper-parameters that choose a network, and so may be a user's own network."""
    names: tuple[str, ...] = getattr(method_class(name), "network_settings", ())
    return names


def split_networks(name: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return hyper-parameters as a run's config keeps them, and the networks among them that are given in Python."""
    names = network_settings(name)
    networks = {key: value for key, value in settings.items() if key in names and is_given(value)}
    return settings | {key: name_of(value) for key, value in networks.items()}, networks


def with_networks(settings: dict[str, Any], networks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a config with the networks given in Python in place of their names."""
    return settings | {key: value for key, value in networks.items() if key in settings}


def given_networks(method: Any) -> dict[str, Any]:
    """Return the networks given in Python among a method's hyper-parameters."""
    names = getattr(method, "network_settings", ())
    return {key: getattr(method, key) for key in names if is_given(getattr(method, key))}


def settings_for(name: str, problem: Problem, given: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that a new run takes in place of defaults; those `given` stay as they are."""
    rule = getattr(method_class(name), "settings_for", None)
    chosen: dict[str, Any] = rule(problem, given) if rule else {}
    return {key: value for key, value in chosen.items() if key not in given}


def build_method(name: str, problem: Problem, settings: dict[str, Any]) -> Method[Any]:
    """Return a method with the given hyper-parameters; the others keep their defaults.

    Args:
        name: a key of METHODS, or `"package.module:Class"`.
        problem: the learning problem.
        settings: hyper-parameters by name, as values or as strings, which are converted to the default's type.
    """
    kind: Any = method_class(name)
    typed = typed_settings(name, settings)
    bindable = isinstance(kind, type) and issubclass(kind, BaseMethod)
    method: Method[Any] = kind(**typed).bind(problem) if bindable else kind(problem=problem, **typed)
    return method


def typed_settings(name: str, settings: dict[str, Any], also: Iterable[str] = ()) -> dict[str, Any]:
    """Return hyper-parameters converted to the types of their defaults; raise PefllError for an unknown name.

    The error may suggest the names in `also`, which are other arguments of the caller.
    """
    defaults = hyperparameters(name)
    for key in settings:
        if key not in defaults:
            raise unknown(f"hyper-parameter of {name}", key, defaults, also)
    networks = network_settings(name)
    return {
        key: value if key in networks and is_given(value) else _as_type_of(defaults[key], value, f"{name}: {key}")
        for key, value in settings.items()
    }


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _as_type_of(default: Any, value: Any, what: str) -> Any:
    kind = type(default)
    value = plain(value)
    if kind is bool:
        if str(value).lower() not in _TRUTHS:
            raise PefllError(f"{what} must be true or false, not {value!r}", code="PEFLL-S002")
        return _TRUTHS[str(value).lower()]
    wrong = PefllError(f"{what} must be {_KINDS.get(kind, kind.__name__)}, not {shown(value)}", code="PEFLL-A014")
    # Without this check, Python would accept a bool as a number and convert any object to a string.
    if kind in _KINDS and not (isinstance(value, str) or (kind is not str and type(value) in (int, float))):
        raise wrong
    try:
        converted = kind(value)
        most = MOST if kind is int else sys.float_info.max
        fits = kind not in (int, float) or (0 <= converted <= most and float(converted) == float(value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise wrong from error
    if not fits:
        raise wrong
    return converted


_KINDS = {int: "a whole number, 0 or more", float: "a finite number, 0 or more", str: "a text"}
