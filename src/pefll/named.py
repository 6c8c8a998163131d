"""Code of a user's own, named as `package.module:name` on the command line or in a config."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pefll.errors import PefllError


class OwnCodeFailed(Exception):
    """A user's own code failed in another process. Its text says how and where."""


def fault(error: BaseException) -> str:
    """Return how and where a user's own code failed, such as "ValueError in mine.py, line 6: no"; else nothing.

    Args:
        error: that was raised; the innermost line outside of this package and of what is installed is the place.
    """
    if isinstance(error.__cause__, OwnCodeFailed):
        return str(error.__cause__)
    paths = sysconfig.get_paths()
    installed = [Path(__file__).parent, *(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
    for place in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(place.filename).is_file() and not any(Path(place.filename).is_relative_to(one) for one in installed):
            return f"{type(error).__name__} in {place.filename}, line {place.lineno}: {error}"
    return ""


_ALLOWED: frozenset[str] | None = None  # None for whatever is named


def allow_only(references: Iterable[str]) -> None:
    """Import nothing by name in this process but these, from now on: for names that come from another machine."""
    global _ALLOWED
    _ALLOWED = frozenset(references)


def import_name(reference: str, what: str) -> Any:
    """Return what `package.module:name` names, also from the current folder.

    Args:
        reference: as the user wrote it.
        what: it should be, for example `"model"`.
    """
    if _ALLOWED is not None and reference not in _ALLOWED:
        raise PefllError(
            f"the server names the {what} {reference!r}, code that nobody allowed here; where you trust it, install it "
            f"and start the client with --code {reference}",
            code="PEFLL-F005",
        )
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script does not
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise PefllError(f"cannot import the {what} {reference!r}: {error}") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise PefllError(f"cannot import the {what} {reference!r}: {fault(error) or error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise PefllError(f"cannot import the {what} {reference!r}: {error}") from error
