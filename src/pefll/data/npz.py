"""Reading `.npz` files of plain arrays, with one sentence for everything that can be wrong with them."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from numpy.lib import format as npy

from pefll.core.errors import PefllError
from pefll.data.federation import Array
from pefll.data.limits import check_growth

# What NumPy writes; others need much memory to read, or modules that may be missing.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # a bit of a member's flags
_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, MemoryError, RecursionError),
    *(RuntimeError, NotImplementedError, UnicodeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)


def read_npz(path: Path, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Array]:
    """Return the named arrays of an `.npz` file; pickled objects in it are refused.

    Every array's size is known from its header, and bounded, before any of its numbers is read.

    Args:
        path: the file.
        needed: names that must be there.
        optional: names that are read if they are there.
    """
    needed = tuple(needed)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in needed if name not in members]
            if missing:
                # Other names were asked for by whoever called, and are not how the file should have been saved.
                advice = "; save it again with np.savez(path, x=..., y=...)" if {"x", "y"} & set(missing) else ""
                have = ", ".join(sorted(members)) or "none at all"
                raise PefllError(f"{path} has no array {', '.join(missing)}; it has {have}{advice}", code="PEFLL-D173")
            wanted = {name: members[name] for name in (*needed, *optional) if name in members}
            _check_members(path, archive, wanted)
            return {name: _read(archive, info) for name, info in wanted.items()}
    except _BROKEN as error:
        if "allow_pickle" in str(error):
            raise PefllError(
                f"{path} holds Python objects; save arrays of numbers or of texts instead", code="PEFLL-D174"
            ) from None
        raise PefllError(
            f"{path} cannot be read as an .npz file: it is damaged or of another kind; save it again", code="PEFLL-D175"
        ) from None


def _check_members(path: Path, archive: zipfile.ZipFile, wanted: dict[str, zipfile.ZipInfo]) -> None:
    """Raise PefllError where arrays are encrypted, oddly compressed, too large, or not as long as they say."""
    total = 0
    for name, info in wanted.items():
        if info.flag_bits & _ENCRYPTED:
            raise PefllError(f"{path}: the array {name} is encrypted; save it again without a password", "PEFLL-D001")
        if info.compress_type not in _COMPRESSIONS:
            raise PefllError(
                f"{path}: the array {name} is compressed in a way that NumPy does not write; save it again with "
                "np.savez_compressed",
                code="PEFLL-D002",
            )
        with archive.open(info) as file:
            header, needed = _bytes_of(file)
        if header + needed != info.file_size:
            raise PefllError(
                f"{path}: the array {name} says that it has {needed:,} bytes, but there are "
                f"{info.file_size - header:,}; save it again",
                code="PEFLL-D003",
            )
        total += needed
    check_growth(str(path), path.stat().st_size, total)


def _bytes_of(file: IO[bytes]) -> tuple[int, int]:
    """Return how long a member's header is, and how many bytes of numbers it promises."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("allow_pickle")  # as NumPy says it
    if any(length < 0 for length in shape):
        raise ValueError("negative length")
    return file.tell(), math.prod(shape) * dtype.itemsize


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        array: Array = npy.read_array(file, allow_pickle=False)
        file.read(1)  # at its end the checksum is compared
        return array
