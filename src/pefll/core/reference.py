"""Plain functions, called references, that faster versions may replace.

`pefll.backend` registers faster versions of a reference, each with a condition. A call uses the first version whose
condition is true, else the plain function. PEFLL_KERNELS=0 in the environment switches all faster versions off.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Version = TypeVar("Version", bound=Callable[..., Any])
_enabled = os.environ.get("PEFLL_KERNELS", "1") != "0"
_versions: dict[Callable[..., Any], list[tuple[Callable[..., bool], Callable[..., Any]]]] = {}


def reference(plain: Callable[P, R]) -> Callable[P, R]:
    """Return `plain` as a function that faster versions may replace; its `__wrapped__` is `plain`."""
    versions: list[tuple[Callable[..., bool], Callable[..., Any]]] = []
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:  # faster versions take their arguments by position
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()  # else those after an argument that is left out would stay by name
            args, kwargs = bound.args, bound.kwargs  # type: ignore[assignment]
        for applies, version in versions:
            if applies(*args, **kwargs):
                result: R = version(*args, **kwargs)
                return result
        return plain(*args, **kwargs)

    _versions[call] = versions
    return call


def fast(of: Callable[..., Any], when: Callable[..., bool]) -> Callable[[Version], Version]:
    """Register a faster version of the reference `of`.

    `when` takes the arguments of a call and returns whether the version can handle them.
    """

    def register(version: Version) -> Version:
        if _enabled:
            _versions[of].append((when, version))
        return version

    return register


def versions_of(plain: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the faster versions of a reference."""
    return [version for _, version in _versions[plain]]


def references() -> list[Callable[..., Any]]:
    """Return all references."""
    return list(_versions)
