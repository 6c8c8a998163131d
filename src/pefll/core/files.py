"""Writes files atomically, so that each is complete or absent; reads and writes JSON and CSV."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pefll.core import locking
from pefll.core.errors import PefllError

# Names of temporary files. Content is written there first. No other program uses or guesses such names.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.pefll-tmp")
# Names that Windows reserves for devices, with or without a suffix.
_DEVICES = re.compile(
    r"(con|prn|aux|nul|clock\$|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?", re.IGNORECASE
)
# Unicode categories of invisible characters: control, format, line separator, paragraph separator.
_INVISIBLE = ("Cc", "Cf", "Zl", "Zp")
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_HASHED = re.compile(r".*-[0-9a-f]{32}", re.DOTALL)
# Bytes of a JSON file that are read, if no other limit is given: enough for the models of a million clients.
MOST_JSON = 1 << 28
_LONGEST = 200  # bytes of a name; file systems allow 255, but suffixes are added
_SPACE = "free some space"
_REMEDIES = {errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE, errno.EFBIG: "raise the limit that `ulimit -f` shows"}
# First characters of a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# The closing quote is optional, so an unclosed string is scanned once, and not again from each escaped quote in it.
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


@contextmanager
def sentences_for_disk_errors(what: str, then: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into a PefllError that names the reason and the file, `what`.

    `then` tells the user what to do after correcting the cause. Without it, the error suggests another place.
    """
    try:
        yield
    except OSError as error:
        cause = _REMEDIES.get(error.errno or 0, "")
        advice = f"{cause} or choose another place" if cause else "choose another place"
        if then:
            advice = f"{cause or 'correct that'}, then {then}"
        raise PefllError(f"cannot write {what}: {error.strerror or error}; {advice}", code="PEFLL-A102") from error


def check_folder(path: Path) -> None:
    """Raise PefllError unless a folder can be written to or created. This function does not create it."""
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    with sentences_for_disk_errors(str(path)):
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def make_folder(path: Path, private: bool = False) -> None:
    """Create a folder and its parents if they are missing; PefllError if that fails.

    With `private` only the owner may enter a new folder; an existing one does not change.
    """
    check_folder(path)  # if `path` is a file, its message is clearer than "File exists"
    with sentences_for_disk_errors(str(path)):
        path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Write a folder's list of files to disk, if its file system can. Otherwise a crash may lose a new file."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:  # network mounts, and folders without permission to read
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM):
            raise


def write_whole(path: Path, content: bytes, private: bool = False) -> None:
    """Write a file atomically: a reader sees the old content or the new, never a part.

    A symbolic link is replaced, not followed. With `private` only the owner may read the file, for any umask.
    """
    if path.name in ("", ".."):
        raise PefllError(f"cannot write {path}: it is a folder; add a file's name to it", code="PEFLL-A109")
    if path.exists() and not (path.is_file() or path.is_dir()):  # replacing would delete the device or pipe
        raise PefllError(
            f"cannot write {path}: it is a device or a pipe, not a file; choose another place", code="PEFLL-A103"
        )
    with sentences_for_disk_errors(str(path)):
        _sweep_once(path.parent)
        temporary, handle = _open_temporary(path, 0o600 if private else 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if locking.fcntl is not None:
                    temporary.replace(path)  # while it is locked, so that no other process removes it
            if locking.fcntl is None:
                temporary.replace(path)  # systems without such locks cannot rename open files
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _open_temporary(path: Path, mode: int) -> tuple[Path, int]:
    """Create a file with an unguessable name beside `path`; return its path and its handle, which is locked.

    It never opens an existing file or link.
    """
    name = path.name.encode("utf-8", "surrogateescape")[:_LONGEST].decode("utf-8", "ignore")
    while True:
        temporary = path.with_name(f".{name}.{secrets.token_hex(8)}.pefll-tmp")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | locking.PRIVATE, mode)
        except FileExistsError:
            continue
        with suppress(OSError):  # file systems without locks: see `sweep`
            locking.lock(handle)
        if os.fstat(handle).st_nlink:
            return temporary, handle
        os.close(handle)  # another process removed the file before it was locked


_swept: set[str] = set()
_sweeping = threading.Lock()


def _sweep_once(folder: Path) -> None:
    """Call `sweep` on a folder before this process first writes to it."""
    name = os.path.abspath(folder)
    with _sweeping:
        if name in _swept:
            return
        _swept.add(name)
    sweep(folder)


def sweep(folder: Path, older: re.Pattern[str] | None = None) -> None:
    """Remove the incomplete files of killed writers from a folder.

    Running writers lock their files, and those on other machines do so, too. On file systems without locks, nothing is
    removed. `older` matches temporary names of earlier versions of this package, which did not lock. Use it only if no
    other process writes to the folder.
    """
    with suppress(OSError):
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            if _TEMPORARY.fullmatch(name) or (older is not None and older.fullmatch(name)):
                _remove_unless_locked(folder / name)


def is_temporary(name: str) -> bool:
    """Return whether a name is that of an incomplete file."""
    return bool(_TEMPORARY.fullmatch(name))


def _remove_unless_locked(path: Path) -> None:
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            return
        handle = os.open(path, os.O_RDONLY | locking.PRIVATE)
        try:
            locking.lock(handle, wait=False)
            path.unlink()
        finally:
            os.close(handle)


def set_aside(path: Path, why: str = "damaged") -> Path:
    """Rename a file or folder instead of deleting it, and return the new path, which contains `why`."""
    with sentences_for_disk_errors(str(path)):
        number = 1
        while os.path.lexists(kept := path.with_name(f"{path.name}.{why}-{number}")):
            number += 1
        os.rename(path, kept)
        sync_folder(path.parent)
    return kept


def check_file_name(name: str, what: str) -> None:
    """Raise PefllError for a file name that does not work on every system. The error calls the file `what`."""
    reason = ""
    if not name or name.startswith(".") or name.endswith((".", " ")) or name != name.strip():
        reason = "it is empty, or begins with a dot or a space, or ends with one"
    elif any(unicodedata.category(letter) in _INVISIBLE or letter in '<>:"/\\|?*' for letter in name):
        reason = 'it has an invisible character or one of < > : " / \\ | ? *'
    elif any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        reason = "it is not valid Unicode"
    elif _DEVICES.fullmatch(unicodedata.normalize("NFKC", name)):  # some systems treat wide letters as plain ones
        reason = "Windows reserves that name for a device"
    elif len(name.encode()) > _LONGEST:
        reason = f"it is longer than {_LONGEST} bytes"
    if reason:
        raise PefllError(f"{name!r} cannot be {what}: {reason}; choose another name", code="PEFLL-R012")


def safe_file_name(text: str) -> str:
    """Return a file name for any text; different texts get different names, also on file systems that ignore case.

    Plain names do not change. Other texts keep their plain characters, and a hash of the text is added.
    """
    if _PLAIN.fullmatch(text) and not _DEVICES.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "id"
    return f"{kept}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


_WHOLE_NUMBERS = re.compile(r"\[\n\s+(-?\d+(?:,\n\s+-?\d+)*)\n\s*\]")


def write_json(path: Path, content: Any, private: bool = False) -> None:
    """Write JSON atomically, with one line per entry and per list of whole numbers; see `write_whole`."""
    text = json.dumps(content, indent=2)
    # JSON escapes line breaks inside texts, so the pattern matches only lists.
    text = _WHOLE_NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    write_whole(path, (text + "\n").encode(), private)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a CSV file with a heading, atomically. All rows have the same keys.

    An apostrophe is put before text that a spreadsheet would read as a formula. Numbers do not change.
    """
    table = io.StringIO()
    columns = csv.writer(table, lineterminator="\n")
    # Some readers start a new row at a carriage return in an unquoted cell.
    quoted = csv.writer(table, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for place, row in enumerate(rows):
        for cells in (row.keys(), row.values()) if not place else (row.values(),):
            plain = [_plain_cell(cell) for cell in cells]
            (quoted if any("\r" in str(cell) for cell in plain) else columns).writerow(plain)
    write_whole(path, table.getvalue().encode())


def _plain_cell(value: Any) -> Any:
    """Return a cell's value, changed if a spreadsheet would read it as a formula."""
    if not isinstance(value, str) or not (value.startswith(_FORMULA) or _first_visible(value) in _FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value if value.isprintable() else f"'{value}"


def _first_visible(text: str) -> str:
    """Return the first visible character except spaces, with wide letters made plain; "" if there is none."""
    plain = (letter for wide in text for letter in unicodedata.normalize("NFKC", wide))
    return next((letter for letter in plain if unicodedata.category(letter)[0] not in "CZ"), "")


@contextmanager
def open_limited(path: Path, most: int) -> Iterator[io.BufferedReader]:
    """Open a file to read it in the block; ValueError if it has more than `most` bytes.

    A hostile sparse file takes no space on disk, but reading it would fill the memory.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes, but at most {most:,} are allowed")
        yield file


def read_limited(path: Path, most: int) -> bytes:
    """Return the content of a file; ValueError if it has more than `most` bytes."""
    with open_limited(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Return the content of a JSON file; PefllError if it is missing, damaged, or longer than `most` bytes."""
    try:
        return parse_json(read_limited(path, most))
    except FileNotFoundError as error:
        raise PefllError(f"there is no {path}", code="PEFLL-A104") from error
    except (OSError, ValueError) as error:
        raise PefllError(f"{path} is damaged: {error}", code="PEFLL-A105") from error


def parse_json(content: bytes | str, depth: int | None = None) -> Any:
    """Return the value of a JSON text or of UTF-8 bytes; ValueError if it is not JSON or nested too deeply.

    `depth` is the maximum number of nested brackets; None means Python's limit.
    """
    text = content if isinstance(content, str) else content.decode()
    if depth is not None and is_nested_deeper(text, depth):
        raise ValueError(f"it has more than {depth} levels of brackets")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels of brackets") from None


def is_nested_deeper(text: str, most: int) -> bool:
    """Return whether a JSON text has more than `most` levels of brackets."""
    if text.count("[") + text.count("{") <= most:  # a fast test that suffices for nearly every message
        return False
    depth = 0
    for found in _BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > most:
            return True
    return False
