"""Code of a user's own, named as `package.module:name` on the command line or in a config."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from pefll.errors import PefllError


def import_name(reference: str, what: str) -> Any:
    """Return what `package.module:name` names, also from the current folder.

    Args:
        reference: as the user wrote it.
        what: it should be, for example `"model"`.
    """
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script does not
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise PefllError(f"cannot import the {what} {reference!r}: {error}") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise PefllError(
            f"cannot import the {what} {reference!r}: {type(error).__name__} in {place.filename}, line {place.lineno}: "
            f"{error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise PefllError(f"cannot import the {what} {reference!r}: {error}") from error
