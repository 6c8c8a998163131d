"""C, compiled when it is first needed, by the compiler of the machine: `cc`, or what PEFLL_CC names (`none` for none).

Machine code is kept in the user's cache folder: ~/.cache/pefll, or under XDG_CACHE_HOME. Where nothing can be compiled,
callers use torch's own operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

# For this very processor, and with no header or library, which a machine may lack though it has a compiler. The last
# one: neighbours in memory are not to be loaded as one where the source says otherwise.
OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-nostdlib", "-fno-tree-slp-vectorize")
SECONDS = 60  # a compiler that takes longer than that is stuck


@cache
def library(source: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL | None:
    """Return a source file as a library, or None where it cannot be compiled.

    Args:
        source: a file beside this one.
        constants: what names in capitals stand for.
    """
    command = compiler()
    if command is None:
        return None
    text = (Path(__file__).parent / source).read_text()
    options = [*OPTIONS, *(f"-D{key}={value}" for key, value in constants)]
    try:
        name = hashlib.sha256("\n".join([_identity(command), _processor(), *options, text]).encode()).hexdigest()
        kept = _cache() / f"{name}.so"
        with suppress(OSError):  # it is not there yet, or damaged
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory() as folder:
            made = _compile(text, command, options, Path(folder))
            if made is None:
                return None
            with suppress(OSError):  # who cannot write there compiles again next time
                _keep(made, kept)
            return ctypes.CDLL(str(made))
    except OSError:
        return None


@cache
def compiler() -> str | None:
    """Return the compiler's path, or None where there is none."""
    wanted = os.environ.get("PEFLL_CC")
    if wanted:
        return None if wanted == "none" else shutil.which(wanted)
    return shutil.which("cc") or shutil.which("gcc")


def version() -> str | None:
    """Return what the compiler calls itself, or None where there is none that answers."""
    command = compiler()
    said = None if command is None else _run(command, "--version")
    return said.splitlines()[0] if said else None


def _compile(text: str, command: str, options: list[str], folder: Path) -> Path | None:
    source, made = folder / "source.c", folder / "library.so"
    source.write_text(text)
    return None if _run(command, *options, str(source), "-o", str(made)) is None else made


def _run(*command: str) -> str | None:
    """Return what a program says, or None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _cache() -> Path:
    """Return where compiled libraries are kept."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pefll"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise OSError(str(error)) from error


def _keep(made: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = kept.with_name(f"{kept.name}.{os.getpid()}.tmp")
    shutil.copyfile(made, new)
    new.replace(kept)  # at once, whole


def _identity(command: str) -> str:
    """Return what tells versions of a compiler apart, without a process of its own for the question."""
    file = Path(command).resolve()
    found = file.stat()
    return f"{file} {found.st_size} {found.st_mtime_ns}"


@cache
def _processor() -> str:
    """Return what tells processors apart for a compiler: the same home folder may be there on other machines."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return f"{platform.machine()} {platform.processor()}"
