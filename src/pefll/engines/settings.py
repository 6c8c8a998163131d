"""Settings of torch and of the C library that engines change while they are open, and restore afterwards."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from pefll.backend import precision as of_products
from pefll.core import process
from pefll.core.errors import PefllError


class ThreadSettings(NamedTuple):
    """Settings that torch has for each thread. An engine changes the settings of its own thread."""

    threads: int
    flush_denormal: bool

    @classmethod
    def now(cls) -> ThreadSettings:
        """Return the current settings of this thread."""
        return cls(torch.get_num_threads(), _flushes_denormal())

    def set(self) -> None:
        """Set this thread to these values."""
        # Python threads that start later inherit this number.
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(self.flush_denormal)

    def without_engines(self, usual: ThreadSettings) -> ThreadSettings:
        """Return these settings, with `usual` values for those that came from an open engine of another thread."""
        threads = usual.threads if self.threads == AT_WORK.threads else self.threads
        return ThreadSettings(threads, self.flush_denormal and usual.flush_denormal)


# One thread per process: clients are small, and with several threads the sums would depend on the number of cores.
# Numbers below 1e-38 become 0, because a CPU is a hundred times slower with such numbers.
AT_WORK = ThreadSettings(threads=1, flush_denormal=True)


class DeviceSettings(NamedTuple):
    """Settings of torch and of our kernels for the whole process, changed while any engine is open."""

    matmul_tf32: bool
    convolution_tf32: bool
    products: str

    @classmethod
    def now(cls) -> DeviceSettings:
        """Return the current settings."""
        return cls(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, of_products.current())

    @classmethod
    def of_engines(cls, precision: str) -> DeviceSettings:
        """Return the settings for engines with a precision: float32, tf32 or bf16.

        Matrix products and convolutions both use TF32, or neither does. For bf16, torch's own operations use TF32.
        """
        tensor_cores = precision in ("tf32", "bf16")
        return cls(tensor_cores, tensor_cores, precision)

    def set(self) -> None:
        """Set torch and our kernels to these values."""
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        torch.backends.cudnn.allow_tf32 = self.convolution_tf32
        of_products.use(self.products)


def set_for_engines(precision: str) -> None:
    """Set this thread and the process for engines, without restoring anything later."""
    AT_WORK.set()
    DeviceSettings.of_engines(precision).set()


class _ThreadState(threading.local):
    """A thread's open engines, and its settings before the first of them opened."""

    def __init__(self) -> None:
        self.open: WeakSet[Any] = WeakSet()
        self.found: ThreadSettings | None = None


class EngineSettings:
    """Changes the settings when the first engine opens, and restores them when the last engine closes.

    It does so for the process and for each thread. The thread that opened an engine should close it. If another thread
    closes it, the opening thread gets its settings back only when it closes another engine of its own.
    """

    _found: ClassVar[DeviceSettings | None] = None
    _usual: ClassVar[ThreadSettings]  # settings of the first engine's thread, before that engine opened
    _open: ClassVar[WeakSet[Any]] = WeakSet()  # weak: an unclosed engine is dropped when it is deleted
    _keeps_memory: ClassVar[bool] = False
    _thread_state: ClassVar[_ThreadState] = _ThreadState()

    @classmethod
    def take(cls, engine: object, precision: str = "float32", keep_memory: bool = True) -> None:
        """Set torch for an engine; raise PefllError if an open engine needs other settings.

        Args:
            engine: the engine that opens.
            precision: see `DeviceSettings.of_engines`.
            keep_memory: whether to call `keep_freed_memory`; useless for engines that are open for milliseconds.
        """
        with process.lock:
            if cls._open and of_products.PRODUCTS[of_products.current()] != of_products.PRODUCTS[precision]:
                raise PefllError(
                    f"an engine with precision {of_products.current()} is open, so another cannot have {precision}; "
                    "close it first, or train runs of different precision one after another",
                    code="PEFLL-T001",
                )
            found = ThreadSettings.now()
            if cls._found is None:
                cls._found, cls._usual = DeviceSettings.now(), found
            mine = cls._thread_state
            if mine.found is None:
                mine.found = found.without_engines(cls._usual) if cls._open else found
            cls._open.add(engine)
            mine.open.add(engine)
            set_for_engines(precision)
            if keep_memory and not cls._keeps_memory:
                keep_freed_memory(True)
                cls._keeps_memory = True

    @classmethod
    def give_back(cls, engine: object) -> None:
        """Note that an engine was closed. After the last engine, restore torch's settings."""
        with process.lock:
            mine = cls._thread_state
            mine.open.discard(engine)
            if not mine.open and mine.found is not None:
                mine.found.set()
                mine.found = None
            cls._open.discard(engine)
            if not cls._open and cls._found is not None:
                cls._found.set()
                cls._found = None
                if cls._keeps_memory:
                    keep_freed_memory(False)
                    cls._keeps_memory = False


def _flushes_denormal() -> bool:
    """Whether denormal numbers become 0. torch has no function for this, but a division in Python shows it."""
    return sys.float_info.min / 2 == 0


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers for two settings
_KEEP_ALL = 1 << 30  # value of both settings while an engine is open
# The values that glibc sets by itself after large tensors. Old versions of glibc accept no larger ones.
_USUAL_TRIM, _USUAL_MMAP = 1 << 26, 1 << 25


def keep_freed_memory(keep: bool) -> None:
    """Let glibc keep the memory of freed tensors for new tensors, or return it to the system.

    By default glibc returns much of this memory, and the system hands it out again page by page. That costs hundreds of
    page faults in a client's step, and tens of thousands in a hypernetwork's. Other C libraries are not changed.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        return
    library.mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    library.mallopt(_TRIM_THRESHOLD, _KEEP_ALL if keep else _USUAL_TRIM)
    if keep:
        library.mallopt(_MMAP_THRESHOLD, _KEEP_ALL)
    else:
        library.malloc_trim(0)
