"""A restricted unpickler. It reads plain values and arrays of bytes, and refuses anything that could run code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.samples import Array

# Errors that a damaged or hostile pickle causes inside the unpickler.
_BROKEN = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError),
    *(KeyError, AttributeError, OverflowError, MemoryError),
)


class _Dtype:
    """Replaces NumPy's dtype; accepts only the type of bytes, uint8."""

    def __init__(self, kind: bytes | str, align: object = False, copy: object = True) -> None:
        if kind not in (b"u1", "u1"):
            raise pickle.UnpicklingError("it has arrays of something else than bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore the state: bytes need none."""


class _Array:
    """Replaces NumPy's array while a file is read. It takes a shape and bytes.

    NumPy's array would trust the type and flags in the file.
    """

    def __init__(self, subtype: object, shape: object, kind: object) -> None:
        self.value: Array | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, bytes]) -> None:
        """Make the array from (version, shape, dtype, whether the order is Fortran's, bytes)."""
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("it has an array without bytes")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Replaces the function that turns text into bytes in pickles which Python 3 wrote for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


# NumPy 2 renamed the module of `_reconstruct`, so it is here under both names.
_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only the names in `_ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a name in the file; UnpicklingError for a name that is not in `_ALLOWED`."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_pickle(data: bytes, where: str) -> dict[bytes, Any]:
    """Return the dictionary in a Python 2 pickle. Keys and texts are bytes, arrays are uint8. Errors name `where`."""
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _BROKEN as error:
        raise PefllError(
            f"{where} is damaged or not the official file ({error}); download it again", code="PEFLL-D208"
        ) from None
    if not isinstance(content, dict):
        raise PefllError(
            f"{where} holds a {type(content).__name__}, not a dictionary as the official file; download it again",
            code="PEFLL-D209",
        )
    return {key: value.value if isinstance(value, _Array) else value for key, value in content.items()}
