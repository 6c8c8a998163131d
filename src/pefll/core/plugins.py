"""Plug-ins: a user's own code, named as `package.module:name` on the command line or in Python.

Files and servers name code too, for example a run's config or a federation's settings. A stranger may have written
them. So such code is imported only if the user has also named it, in this process or in the environment.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError, first_line
from pefll.core.wording import argument, either, first_few

# Environment variable with the names of the code that child processes may import, separated by commas.
CODE = "PEFLL_CODE"
_allowed: set[str] = set()


class OwnCodeFailed(Exception):
    """A user's code failed in another process. The text of the exception is that of `fault`."""


def fault(error: BaseException) -> str:
    """Return how and where a user's code failed, for example "ValueError in mine.py, line 6: bad shape".

    The line is the innermost one outside of this package and of installed packages. Without such a line, return "".
    """
    if isinstance(error.__cause__, OwnCodeFailed):
        return str(error.__cause__)
    paths = sysconfig.get_paths()
    installed = [
        Path(__file__).parents[1],
        *(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    ]
    for place in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(place.filename).is_file() and not any(Path(place.filename).is_relative_to(one) for one in installed):
            where = f"{type(error).__name__} in {place.filename}, line {place.lineno}"
            return f"{where}: {first_line(error)}" if str(error) else where
    return ""


def allow(*names: object) -> None:
    """Allow the import of code that the user named, such as `"package.module:function"`; ignore other values."""
    _allowed.update(name for name in names if isinstance(name, str) and ":" in name)


def allow_only(*names: object) -> None:
    """Allow only these names. Forget earlier names and those in the environment, because a server may ask for them."""
    _allowed.clear()
    os.environ.pop(CODE, None)
    allow(*names)


def is_allowed(reference: str) -> bool:
    """Return whether the user named this code, in this process or in the environment."""
    return reference in _allowed or reference in os.environ.get(CODE, "").split(",")


def check_allowed(references: Sequence[str], what: str, advice: str) -> None:
    """Raise PefllError if the user did not name some of this code; `advice` is the argument that names all of it."""
    references = list(dict.fromkeys(references))
    if strange := [each for each in references if not is_allowed(each)]:
        codes = " ".join(f"--code {shlex.quote(each)}" for each in references)
        raise PefllError(
            f"a file or a server names the code {first_few(map(repr, strange))} as {what}; it runs only if you name it "
            f"yourself: pass {advice} (for a client {codes}), or set {CODE}={','.join(references)} in the environment",
            code="PEFLL-M001",
        )


def import_name(reference: str, what: str, *, setting: bool = False) -> Any:
    """Import and return the object `package.module:name`. The module may also be in the current folder.

    PefllError if the user did not name it, or if the import fails. `what` describes it, for example `"model"`. With
    `setting`, it is a hyper-parameter of this name.
    """
    name, bracket, settings = reference.partition("(")
    if bracket:
        words = " ".join([name, *settings.replace(",", " ").replace(")", " ").split()]) if what == "task" else name
        written = _as_setting(what, name) if setting else argument(what, words)
        raise PefllError(f"the {what} {reference!r} is a call, not a name; write {written}", code="PEFLL-A113")
    named = _as_setting(what, reference)
    check_allowed([reference], what, named if setting else argument(what, reference))
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` adds this folder, a console script does not
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise PefllError(f"cannot import the {what} {reference!r}: {error}", code="PEFLL-A106") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise PefllError(
            f"cannot import the {what} {reference!r}: {fault(error) or error}", code="PEFLL-A107"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise PefllError(f"cannot import the {what} {reference!r}: {error}", code="PEFLL-A108") from error


def _as_setting(name: str, value: str) -> str:
    """Return a hyper-parameter as the reader writes it."""
    return either(f"--set {name}={shlex.quote(value)}", f"{name}={value!r}")
