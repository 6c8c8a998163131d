"""Reading pickles that hold arrays of bytes and plain values, and nothing that could run code."""

from __future__ import annotations

import codecs
import io
import pickle
from typing import Any

import numpy as np

from pefll.data.federation import Array
from pefll.errors import PefllError

# What a broken or hostile pickle can raise from inside the unpickler.
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    MemoryError,
)


def _new_array(subtype: type, shape: tuple[int, ...], kind: bytes) -> Array:
    """Stand in for NumPy's private function of the same purpose, whose module moved between NumPy 1 and 2."""
    if subtype is not np.ndarray:
        raise pickle.UnpicklingError("not a plain array")
    return np.ndarray(shape, dtype=kind.decode() if isinstance(kind, bytes) else kind)


def _new_dtype(kind: bytes | str, align: object = False, copy: object = True) -> np.dtype[Any]:
    """Make a dtype; the old files give the flags as integers, of which newer NumPy warns."""
    return np.dtype(kind.decode() if isinstance(kind, bytes) else kind, align=bool(align), copy=bool(copy))


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _new_dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only the names above."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the file stands for, or refuse the file."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_pickle(data: bytes, where: str) -> dict[bytes, Any]:
    """Return the dictionary in a Python 2 pickle; its keys and texts are bytes.

    Args:
        data: the whole file.
        where: named in errors.
    """
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _BROKEN as error:
        raise PefllError(f"{where} is damaged or not the official file ({error}); download it again") from None
    if not isinstance(content, dict):
        raise PefllError(f"{where} holds a {type(content).__name__} where the official file has a dictionary")
    return content
