"""C, compiled when it is first needed, by the compiler of the machine: `cc`, or what PEFLL_CC names (`none` for none).

Machine code is kept in the user's cache folder.
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

# For this very processor, and with no header or library, which a machine may lack though it has a compiler. The last
# one: neighbours in memory are not to be loaded as one where the source says otherwise.
OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-nostdlib", "-fno-tree-slp-vectorize")
SECONDS = 60  # a compiler that takes longer than that is stuck
DIGEST = hashlib.sha256().digest_size


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
        kept = cache_folder() / f"{name}.so"
        if _is_intact(kept):
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "library.so"
            if not _compile(text, command, options, made):
                return None
            with suppress(OSError):  # who cannot write there compiles again next time
                _keep(made, kept)
            # From where the next process has it, so that both can load it or neither: programs may not run from /tmp.
            return ctypes.CDLL(str(kept if _is_intact(kept) else made))
    except OSError:
        return None


@cache
def compiler() -> str | None:
    """Return the compiler's path, or None where there is none."""
    wanted = os.environ.get("PEFLL_CC")
    if not wanted:
        return shutil.which("cc") or shutil.which("gcc")
    if wanted == "none":
        return None
    found = shutil.which(wanted)
    if found is None:
        raise PefllError(
            f"PEFLL_CC names no program that is there: {wanted}; a path or a name without options, or none",
            code="PEFLL-E004",
        )
    return found


def version() -> str | None:
    """Return what the compiler calls itself, or None where there is none that answers."""
    command = compiler()
    said = None if command is None else _run(command, "--version")
    return said.splitlines()[0] if said else None


def _compile(text: str, command: str, options: list[str], made: Path) -> bool:
    """Compile into a file; return whether the compiler says that it has."""
    source = made.with_suffix(".c")
    source.write_text(text)
    return _run(command, *options, str(source), "-o", str(made)) is not None


def _run(*command: str) -> str | None:
    """Return what a program says, or None where it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _keep(made: Path, kept: Path) -> None:
    """Copy a library to where it is kept, with its digest behind it: one that is cut off would end the process."""
    content = made.read_bytes()
    kept.parent.mkdir(parents=True, exist_ok=True)
    number, new = tempfile.mkstemp(dir=kept.parent, suffix=".tmp")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, kept)  # at once, whole
    except BaseException:
        os.unlink(new)
        raise


def _is_intact(kept: Path) -> bool:
    """Whether a library that was kept is there as it was written."""
    with suppress(OSError):
        content = kept.read_bytes()
        return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]
    return False


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
