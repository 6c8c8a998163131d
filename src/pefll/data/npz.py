"""Reading `.npz` files of plain arrays, with one sentence for everything that can be wrong with them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pefll.data.federation import Array
from pefll.errors import PefllError


def read_npz(path: Path, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Array]:
    """Return the named arrays of an `.npz` file; pickled objects in it are refused.

    Args:
        path: the file.
        needed: names that must be there.
        optional: names that are read if they are there.
    """
    needed = tuple(needed)
    try:
        # NumPy would also read a single array or a pickle here, whatever the file is called.
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
            missing = [name for name in needed if name not in names]
            if missing:
                # Other names were asked for by whoever called, and are not how the file should have been saved.
                advice = "; save it again with np.savez(path, x=..., y=...)" if {"x", "y"} & set(missing) else ""
                have = ", ".join(sorted(names)) or "none at all"
                raise PefllError(f"{path} has no array {', '.join(missing)}; it has {have}{advice}")
            return {name: archive[name] for name in (*needed, *optional) if name in names}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
        if "allow_pickle" in str(error):
            raise PefllError(f"{path} holds Python objects; save arrays of numbers or of texts instead") from None
        raise PefllError(
            f"{path} cannot be read as an .npz file: it is damaged or of another kind; save it again"
        ) from None
