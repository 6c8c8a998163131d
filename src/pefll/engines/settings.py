"""Settings of torch and of the C library that engines change while they are open, and give back."""

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
    """Settings of torch that every thread has of its own, and engines change in theirs."""

    threads: int
    flush_denormal: bool

    @classmethod
    def now(cls) -> ThreadSettings:
        """Return them as they are in this thread."""
        return cls(torch.get_num_threads(), _flushes_denormal())

    def set(self) -> None:
        """Set this thread to these values."""
        # The number of threads is also what a thread begins with that has not used torch before.
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(self.flush_denormal)

    def without_engines(self, usual: ThreadSettings) -> ThreadSettings:
        """Return these, less what a thread has begun with because another one's engine was open."""
        threads = usual.threads if self.threads == AT_WORK.threads else self.threads
        return ThreadSettings(threads, self.flush_denormal and usual.flush_denormal)


# One thread a process: clients are small, and sums of several threads would not repeat on machines with other numbers
# of cores. Numbers below 1e-38, which a CPU computes a hundred times slower than others, become 0.
AT_WORK = ThreadSettings(threads=1, flush_denormal=True)


class DeviceSettings(NamedTuple):
    """Settings of torch and of our kernels that a process has once, and engines change while any of them is open."""

    matmul_tf32: bool
    convolution_tf32: bool
    products: str

    @classmethod
    def now(cls) -> DeviceSettings:
        """Return them as they are."""
        return cls(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, of_products.current())

    @classmethod
    def of_engines(cls, precision: str) -> DeviceSettings:
        """Return what engines of a precision want; TF32 for products and convolutions alike, or for neither.

        Args:
            precision: of products on a GPU: float32, tf32 or bf16 (which torch's own operations take for tf32).
        """
        tensor_cores = precision in ("tf32", "bf16")
        return cls(tensor_cores, tensor_cores, precision)

    def set(self) -> None:
        """Set torch and our kernels to these values."""
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        torch.backends.cudnn.allow_tf32 = self.convolution_tf32
        of_products.use(self.products)


def set_for_engines(precision: str) -> None:
    """Set this thread, and the process, as for an engine that is never closed."""
    AT_WORK.set()
    DeviceSettings.of_engines(precision).set()


class _OfThread(threading.local):
    """The engines that a thread has opened, and the settings that it had before the first."""

    def __init__(self) -> None:
        self.open: WeakSet[Any] = WeakSet()
        self.found: ThreadSettings | None = None


class EngineSettings:
    """The settings while engines are open: the first one sets them, the last one gives torch its own back.

    So it is for the process, and for each thread with what is the thread's own. An engine is closed in the thread that
    opened it; where another closes it, the thread has its settings back when it closes the next one.
    """

    _found: ClassVar[DeviceSettings | None] = None
    _usual: ClassVar[ThreadSettings]  # of the thread of the first one
    _open: ClassVar[WeakSet[Any]] = WeakSet()  # an engine that was never closed counts as long as somebody has it
    _keeps_memory: ClassVar[bool] = False
    _of_thread: ClassVar[_OfThread] = _OfThread()

    @classmethod
    def take(cls, engine: object, precision: str = "float32", keep_memory: bool = True) -> None:
        """Set torch for an engine; raise PefllError where one that is open needs other settings.

        Args:
            engine: who opens.
            precision: see `DeviceSettings.of_engines`.
            keep_memory: see `keep_freed_memory`; not worth it for what is open for some milliseconds at a time.
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
            mine = cls._of_thread
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
        """Note that an engine was closed; after the last one, torch is as it was before the first."""
        with process.lock:
            mine = cls._of_thread
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
    """Whether numbers too small for full precision become 0; torch has no question for it, so one is computed.

    The setting is the processor's and not torch's, so that Python's numbers show it too.
    """
    return sys.float_info.min / 2 == 0


# The GNU library's numbers for two of its settings; values for an open engine; and the ones that the library itself
# comes to in a process with large tensors, which are also the most that old versions take.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEEP_ALL = 1 << 30
_USUAL_TRIM, _USUAL_MMAP = 1 << 26, 1 << 25


def keep_freed_memory(keep: bool) -> None:
    """Let the C library keep the memory of freed tensors for the next ones, or give it back to the system.

    The GNU library by default gives back much of it, and the system hands it out again page by page: hundreds of page
    faults in a client's step, tens of thousands in a hypernetwork's. Other libraries are left as they are.
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
