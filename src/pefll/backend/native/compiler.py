"""Compiles C at first use, with `cc` or `gcc`, or with the program that PEFLL_CC names. PEFLL_CC=none switches it off.

The machine code is stored in the user's cache folder.
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

from pefll.backend.cache import cache_folder
from pefll.core.errors import PefllError

# -march: the code is for this processor only. -nostdlib: a machine with a compiler may lack libraries and headers. The
# last option: the compiler must not merge loads of neighbouring numbers by itself.
OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-nostdlib", "-fno-tree-slp-vectorize")
SECONDS = 60  # time limit; a compiler that needs longer hangs
DIGEST = hashlib.sha256().digest_size


@cache
def library(source: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL | None:
    """Return the compiled and loaded library of a source file, or None if it cannot be compiled.

    Args:
        source: a file in this folder.
        constants: the names in capitals of the source, with their values.
    """
    command = compiler()
    if command is None:
        return None
    text = (Path(__file__).parent / source).read_text(encoding="utf-8")
    options = [*OPTIONS, *(f"-D{key}={value}" for key, value in constants)]
    try:
        name = hashlib.sha256("\n".join([_identity(command), _processor(), *options, text]).encode()).hexdigest()
        kept = cache_folder() / f"{name}.so"
        if _is_intact(kept):
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "library.so"
            if not _compile(text, command, options, made):
                return None
            with suppress(OSError):  # if it cannot be written, the next process compiles again
                _keep(made, kept)
            # Load it from the cache if possible, as later processes do. Some systems load no libraries from /tmp.
            return ctypes.CDLL(str(kept if _is_intact(kept) else made))
    except OSError:
        return None


@cache
def compiler() -> str | None:
    """Return the compiler's path, or None if there is none."""
    wanted = os.environ.get("PEFLL_CC")
    if not wanted:
        return shutil.which("cc") or shutil.which("gcc")
    if wanted == "none":
        return None
    found = shutil.which(wanted)
    if found is None:
        raise PefllError(
            f"PEFLL_CC names a program that does not exist: {wanted}; give a path or a name without options, or none",
            code="PEFLL-E004",
        )
    return found


def version() -> str | None:
    """Return the first line of the compiler's `--version`, or None if there is no working compiler."""
    command = compiler()
    said = None if command is None else _run(command, "--version")
    return said.splitlines()[0] if said else None


def _compile(text: str, command: str, options: list[str], made: Path) -> bool:
    """Compile `text` into the file `made`, and return whether the compiler succeeded."""
    source = made.with_suffix(".c")
    source.write_text(text, encoding="utf-8")
    return _run(command, *options, str(source), "-o", str(made)) is not None


def _run(*command: str) -> str | None:
    """Return a program's output, or None if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _keep(made: Path, kept: Path) -> None:
    """Copy a library to the cache, with a digest at its end. Loading a truncated library would kill the process."""
    content = made.read_bytes()
    kept.parent.mkdir(parents=True, exist_ok=True)
    number, new = tempfile.mkstemp(dir=kept.parent, suffix=".tmp")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, kept)  # atomic
    except BaseException:
        os.unlink(new)
        raise


def _is_intact(kept: Path) -> bool:
    """Whether the cache has the library and it is not damaged."""
    with suppress(OSError):
        content = kept.read_bytes()
        return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]
    return False


def _identity(command: str) -> str:
    """Return a text that differs between versions of a compiler. The compiler is not started for that."""
    file = Path(command).resolve()
    found = file.stat()
    return f"{file} {found.st_size} {found.st_mtime_ns}"


@cache
def _processor() -> str:
    """Return a text that differs between processors, because several machines may share a home folder."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return f"{platform.machine()} {platform.processor()}"
