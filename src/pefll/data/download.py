"""Downloads official archives, resumes interrupted downloads, and checks the md5."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pefll.core import locking
from pefll.core.errors import PefllError, unknown

# A function that is called with the bytes so far and the bytes in total (None if the server does not say).
Progress = Callable[[int, int | None], None]
_BLOCK = 1 << 18
_TIMEOUT = 30.0
_ATTEMPTS = 5
_RANGE_NOT_SATISFIABLE = 416


class Archive(NamedTuple):
    """An official file: its address, its name in the data folder, and its published md5."""

    url: str
    file: str
    md5: str


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
    ),
}
# How to make the data sets that cannot be downloaded.
RECIPES = {
    "femnist": (
        "clone https://github.com/TalwalkarLab/leaf, run in leaf/data/femnist "
        "`./preprocess.sh -s niid --sf 1.0 -k 0 -t sample`, and copy its data/train and data/test to {folder}/femnist"
    ),
    "shakespeare": (
        "clone https://github.com/TalwalkarLab/leaf, run in leaf/data/shakespeare "
        "`./preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.9`, and copy its data/train and data/test to "
        "{folder}/shakespeare; or write one line of JSON with user and text per role to "
        "{folder}/shakespeare/roles.jsonl"
    ),
    "mnist_writers": (
        "join MNIST with the writer ids of https://github.com/facebookresearch/qmnist and save images uint8 [n,28,28], "
        "labels and writer_id with numpy.savez to {folder}/mnist_writers/mnist_by_writer.npz"
    ),
}


def get(name: str, data_dir: Path | str, report: Progress | None = None) -> Path | None:
    """Download a data set's official archive into the data folder and return its path; None if it needs no file.

    `report` is called with (bytes so far, bytes in total).
    """
    data_dir = Path(data_dir).expanduser()
    if name == "digits":
        return None
    name = "shakespeare" if name == "shakespeare_tenth" else name
    if name in RECIPES:
        raise PefllError(f"{name} cannot be downloaded: {RECIPES[name].format(folder=data_dir)}", code="PEFLL-D128")
    if name not in ARCHIVES:
        raise unknown("data set", name, ["digits", *ARCHIVES, *RECIPES])
    archive = ARCHIVES[name]
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PefllError(f"the folder {data_dir} cannot be made: {error.strerror}", code="PEFLL-D129") from None
    return fetch(archive, data_dir, report)


def part_of(archive: Archive, data_dir: Path) -> Path:
    """Return the path of an archive's unfinished download."""
    return data_dir / f"{archive.file}.part"


def fetch(archive: Archive, data_dir: Path, report: Progress | None = None) -> Path:
    """Download an archive, starting from `FILE.part` if that exists, and return its path. See `get`."""
    target, part = data_dir / archive.file, part_of(archive, data_dir)
    if target.is_file() and _md5(target) == archive.md5:
        return target
    by_hand = f"download {archive.url} by hand into {data_dir}, then run `pefll data check {data_dir}`"
    for attempt in range(_ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            complete = _transfer(archive.url, part, report)
        except urllib.error.HTTPError as error:
            if error.code == _RANGE_NOT_SATISFIABLE and before:
                complete = True  # the server has no more bytes; if `part` is too long, its md5 is wrong
            else:
                raise PefllError(
                    f"{archive.url} answered {error.code} {error.reason}; {by_hand}", code="PEFLL-D130"
                ) from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error
            complete, why = False, str(reason)
        except OSError as error:
            raise PefllError(f"{part} cannot be written: {error.strerror}", code="PEFLL-D131") from None
        else:
            why = "the connection broke off"
        if complete:
            return _finish(archive, part, target, by_hand)
        got = part.stat().st_size if part.exists() else 0
        if got == before or attempt == _ATTEMPTS - 1:
            break
    kept = f"{got:,} bytes are kept and the same command continues there, or " if got else ""
    raise PefllError(f"{archive.url} could not be downloaded ({why}); {kept}{by_hand}", code="PEFLL-D132")


def _transfer(url: str, part: Path, report: Progress | None) -> bool:
    """Download the rest of a file into `part`; return whether the file is complete."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "pefll"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
        continues = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {done}-")
        if done and not continues:
            if reply.status == 206:
                raise http.client.HTTPException("the server sent another part of the file")
            done = 0  # the server ignores ranges and sends the whole file
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length and length.isdecimal() else None
        # The name is predictable, so an attacker could put a link there. `PRIVATE` does not follow links.
        how = os.O_WRONLY | os.O_CREAT | locking.PRIVATE | (os.O_APPEND if done else os.O_TRUNC)
        with os.fdopen(os.open(part, how, 0o666), "ab" if done else "wb") as file:
            while block := reply.read(_BLOCK):
                file.write(block)
                done += len(block)
                if report is not None:
                    report(done, total)
    return total is None or done == total


def _finish(archive: Archive, part: Path, target: Path, by_hand: str) -> Path:
    """Rename a complete download, or remove it if its md5 is wrong."""
    if _md5(part) != archive.md5:
        part.unlink()
        raise PefllError(
            f"the file from {archive.url} is not the official one (wrong md5) and was removed; {by_hand}",
            code="PEFLL-D133",
        )
    os.replace(part, target)
    return target


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
