"""Compiles CUDA C++ kernels at first use with NVRTC, the compiler that comes with torch.

The machine code is stored in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pefll.backend.cache import cache_folder
from pefll.core.warning import warn

Argument = Tensor | int | ctypes.c_longlong  # a kernel gets an int as 32 bits
Kernel = Callable[[tuple[int, int], int, int, Sequence[Argument]], None]


@cache
def kernel(name: str, source: str, constants: tuple[tuple[str, int], ...], device: torch.device) -> Kernel:
    """Return a function that launches a kernel.

    The function's arguments are the grid, the threads of a block, the bytes of shared memory, and a kernel's arguments.

    Args:
        name: name of the kernel's function in the source.
        source: a file in this folder.
        constants: the names in capitals of the source, with their values.
        device: a GPU.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code, kept = machine_code(source, constants, device)
    with torch.cuda.device(device):
        _have_context(device)
        if _driver().cuModuleLoadData(ctypes.byref(module), code):
            kept.unlink(missing_ok=True)  # the cached file may be damaged
            code, _ = machine_code(source, constants, device)
            _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    allowed = 48 << 10  # bytes of shared memory that need no attribute

    def launch(grid: tuple[int, int], threads: int, shared: int, arguments: Sequence[Argument]) -> None:
        nonlocal allowed
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        with torch.cuda.device(device):
            _have_context(device)
            if shared > allowed:
                dynamic_shared_memory = 8
                _check(_driver().cuFuncSetAttribute(function, dynamic_shared_memory, shared))
                allowed = shared
            _check(_driver().cuLaunchKernel(function, *grid, 1, threads, 1, 1, shared, stream, pointers, None))

    return launch


@cache
def works(device: torch.device) -> bool:
    """Return whether a small kernel compiles. The compiler or the driver may be missing, or the GPU may be too old."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        kernel("compile_probe", "compile_probe.cu", (("BF16", 1),), device)
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warn(f"CUDA C++ cannot be compiled here ({reason}); Triton's kernels are used instead")
        return False
    return True


def _value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_longlong:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int) and not -(1 << 31) <= argument < 1 << 31:
        raise OverflowError(f"{argument} has more than 32 bits")  # ctypes would silently drop bits
    return ctypes.c_int(argument) if isinstance(argument, int) else argument


def _have_context(device: torch.device) -> None:
    """Give this thread the device's CUDA context if it has no context yet. A new thread has none."""
    current = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(current)))
    if not current:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(current), device.index))
        _check(_driver().cuCtxSetCurrent(current))


def machine_code(source: str, constants: tuple[tuple[str, int], ...], device: torch.device) -> tuple[bytes, Path]:
    """Return a source file's machine code for this device, from the cache or compiled, and its path in the cache."""
    here = Path(__file__).parent
    text = (here / "primitives.cuh").read_text(encoding="utf-8") + (here / source).read_text(encoding="utf-8")
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17", *(f"-D{key}={value}" for key, value in constants)]
    name = hashlib.sha256("\n".join([torch.__version__, str(torch.version.cuda), *options, text]).encode()).hexdigest()
    kept = cache_folder() / f"{name}.cubin"
    with suppress(OSError):
        return kept.read_bytes(), kept
    code = _compile(text, source, options)
    with suppress(OSError):  # if it cannot be written, the next process compiles again
        kept.parent.mkdir(parents=True, exist_ok=True)
        number, new = tempfile.mkstemp(dir=kept.parent, suffix=".tmp")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(code)
            os.replace(new, kept)  # atomic
        except BaseException:
            os.unlink(new)
            raise
    return code, kept


def _compile(text: str, source: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.encode(), 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        if failed:
            log = _bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise RuntimeError(f"{source} does not compile: {log.decode(errors='replace').strip()}")
        return _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, size_of: Callable[..., int], read: Callable[..., int]) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if _on_windows() else "libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    names = [f"nvrtc64_{major}0_0.dll"] if _on_windows() else [f"libnvrtc.so.{major}", "libnvrtc.so"]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"there is no {names[0]}")


def _on_windows() -> bool:
    return hasattr(ctypes, "windll")


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA answered with error {code}")
