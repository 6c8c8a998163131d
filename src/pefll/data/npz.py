"""Reads arrays from `.npz` files, which may be damaged or hostile."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.limits import NUMBER, OBJECT, check_growth
from pefll.data.samples import Array

# Methods of compression that NumPy writes. Others may need much memory, or modules that are missing.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1  # bit in the flags of an encrypted array
_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, MemoryError, RecursionError),
    *(RuntimeError, NotImplementedError, UnicodeError, SyntaxError, zipfile.BadZipFile, zlib.error),
)


class _Header(NamedTuple):
    """The header of an array in the file."""

    length: int  # bytes of the header itself
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Bytes of the array in the file, before compression."""
        return self.entries * self.dtype.itemsize

    @property
    def needed(self) -> int:
        """Bytes of memory for the array: texts become Python objects; labels, clients and splits become int64."""
        if self.dtype.kind in "US":
            return self.stored + self.entries * OBJECT
        return max(self.stored, self.entries * NUMBER) if len(self.shape) == 1 else self.stored


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in a valid `.npz` file."""
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_npz(path: Path, needed: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Array]:
    """Return the named arrays of an `.npz` file. `optional` names may be absent. Pickled objects raise PefllError.

    The sizes in the headers are checked before any array is read.
    """
    needed = tuple(needed)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in needed if name not in members]
            if missing:
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
    """Raise PefllError for arrays that are encrypted, compressed unusually, too large, or of a wrong length."""
    headers: dict[str, _Header] = {}
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
            header = _header(file)
        if header.length + header.stored != info.file_size:
            raise PefllError(
                f"{path}: the header of the array {name} says {header.stored:,} bytes, but there are "
                f"{info.file_size - header.length:,}; save it again",
                code="PEFLL-D003",
            )
        # Empty entries take no bytes in the file, but each takes some in memory.
        if header.dtype.itemsize == 0 and header.entries:
            raise PefllError(
                f"{path}: the {header.entries:,} entries of the array {name} are empty; save it again with "
                "numbers or texts",
                code="PEFLL-D012",
            )
        headers[name] = header
    check_growth(str(path), path.stat().st_size, sum(header.needed for header in headers.values()))
    lengths = {name: header.shape[0] for name, header in headers.items() if header.shape}
    for name, length in lengths.items():
        if "x" in lengths and length != lengths["x"]:
            raise PefllError(
                f"{path}: x has {counted(lengths['x'], 'sample')} but {name} has {length:,}; they must be equal",
                code="PEFLL-D135",
            )


def _header(file: IO[bytes]) -> _Header:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("allow_pickle")  # NumPy's own error has this word too; see `read_npz`
    if any(length < 0 for length in shape):
        raise ValueError("negative length")
    return _Header(file.tell(), shape, dtype)


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        array: Array = npy.read_array(file, allow_pickle=False)
        file.read(1)  # at the end of the file, zipfile verifies the checksum
        return array
