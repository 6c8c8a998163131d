"""Reading pickles that hold arrays of bytes and plain values, and nothing that could run code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.federation import Array

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


class _Dtype:
    """Stands for NumPy's dtype of bytes; its state says nothing that matters for bytes, and is not believed."""

    def __init__(self, kind: bytes | str, align: object = False, copy: object = True) -> None:
        if kind not in (b"u1", "u1"):
            raise pickle.UnpicklingError("it has arrays of something else than bytes")

    def __setstate__(self, state: object) -> None:
        """Take the state and leave it."""


class _Array:
    """Stands for NumPy's array while a file is read.

    A true array takes its type and flags from the file as they are, and NumPy trusts them. This one takes a shape and
    bytes. It also does not care that the function which makes arrays has moved between NumPy 1 and 2.
    """

    def __init__(self, subtype: object, shape: object, kind: object) -> None:
        self.value: Array | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, bytes]) -> None:
        """Take (version, shape, dtype, whether columns come first, bytes)."""
        _, shape, dtype, columns_first, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("it has an array without bytes")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if columns_first else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Stand for the function by which newer Pythons write bytes into old pickles."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only the names above."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the file stands for, or refuse the file."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_pickle(data: bytes, where: str) -> dict[bytes, Any]:
    """Return the dictionary in a Python 2 pickle; its keys and texts are bytes, its arrays uint8.

    Args:
        data: the whole file.
        where: named in errors.
    """
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _BROKEN as error:
        raise PefllError(
            f"{where} is damaged or not the official file ({error}); download it again", code="PEFLL-D208"
        ) from None
    if not isinstance(content, dict):
        raise PefllError(
            f"{where} holds a {type(content).__name__} where the official file has a dictionary", code="PEFLL-D209"
        )
    return {key: value.value if isinstance(value, _Array) else value for key, value in content.items()}
