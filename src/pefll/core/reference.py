"""Plain functions that faster versions may stand in for.

A reference is a plain function, written where a reader meets it. `pefll.backend` registers faster versions of it, each
with the question when it may stand in. With PEFLL_KERNELS=0 in the environment no version stands in, and the plain
functions do everything.
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
    """Let faster versions stand in for a function; `plain.__wrapped__` of the result is the plain one."""
    versions: list[tuple[Callable[..., bool], Callable[..., Any]]] = []
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:  # versions get arguments by position
            bound = signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs  # type: ignore[assignment]
        for may_stand_in, version in versions:
            if may_stand_in(*args, **kwargs):
                result: R = version(*args, **kwargs)
                return result
        return plain(*args, **kwargs)

    _versions[call] = versions
    return call


def fast(of: Callable[..., Any], when: Callable[..., bool]) -> Callable[[Version], Version]:
    """Register a faster version of a reference; of several that may stand in, the first registered one does.

    Args:
        of: the reference.
        when: of the same arguments, whether the version may stand in.
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
