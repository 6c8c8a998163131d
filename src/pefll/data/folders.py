"""Samples from folders of images: client/class/*.png, or class/*.png for one client."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.wording import first_few
from pefll.data.arrays import samples_from_arrays
from pefll.data.limits import check_growth, check_picture
from pefll.data.samples import SPLITS, Array, Samples

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
_DEPTH = 3  # most folders above an image: split/client/class
_MENTIONED = 2  # number of files that an error names


def from_folder(folder: Path, classes: int | None = None) -> Samples:
    """Return samples from `client/class/*.png`, or from `train/client/class/*.png` with `test/` and `validation/`.

    x is uint8 [N, 1 or 3, H, W]. Clients and classes are sorted, and named after their folders.
    """
    tops = _folders(folder)
    by_split = bool(tops) and all(top.name in SPLITS for top in tops)
    clients = [client for top in (tops if by_split else [folder]) for client in _folders(top)]
    files = [image for client in clients for kind in _folders(client) for image in _images(kind)]
    if not files:
        raise _layout_error(folder, "client/class/", "ann/cat/1.png")
    labels, owners, splits = ([image.parents[up].name for image in files] for up in range(3))
    return samples_from_arrays(
        read_images(files), labels, owners, splits if by_split else None, classes, name=folder.resolve().name
    )


def one_client(folder: Path) -> tuple[Array, list[str]]:
    """Return the images uint8 [N, C, H, W] and the class names [N] of `class/*.png`."""
    files = [image for kind in _folders(folder) for image in _images(kind)]
    if not files:
        raise _layout_error(folder, "class/", "cat/1.png")
    return read_images(files), [image.parent.name for image in files]


def is_of_clients(folder: Path) -> bool:
    """Return whether a folder has images in client/class/ and none in class/."""
    kinds = _folders(folder)
    return not any(_images(kind) for kind in kinds) and any(_images(one) for kind in kinds for one in _folders(kind))


def _layout_error(folder: Path, layout: str, example: str) -> PefllError:
    """Return the error for a folder without images in `layout`. The error names expected and existing files."""
    kinds = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    there = first_few((path.relative_to(folder) for path in islice(_files(folder, _DEPTH), _MENTIONED)), _MENTIONED)
    return PefllError(
        f"{folder} has no images in folders {layout}; expected are {kinds} files such as {folder / example}; found "
        f"{there or 'no file at all'}",
        code="PEFLL-D152",
    )


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the sorted files of a folder, then those of its subfolders, at most `depth` folders deep."""
    yield from sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    for below in _folders(folder) if depth else []:
        yield from _files(below, depth - 1)


def read_images(files: Sequence[Path]) -> Array:
    """Return images, all of the same size, as uint8 [N, 1, H, W] if all are grey, else [N, 3, H, W]."""
    try:
        from PIL import Image
    except ImportError:
        raise PefllError("reading images needs Pillow: pip install pillow", code="PEFLL-D153") from None
    # Read all headers before any pixel, because a file of a few bytes may contain a huge picture.
    channels, height, width = _shape(Image, files[0])
    for path in files[1:]:
        other = _shape(Image, path)
        if other[1:] != (height, width):
            raise PefllError(
                f"{path} has {other[2]}x{other[1]} pixels but {files[0]} has {width}x{height}; "
                "make all images equal in size",
                code="PEFLL-D154",
            )
        channels = max(channels, other[0])
    stored = sum(path.stat().st_size for path in files if path.is_file())
    needed = len(files) * channels * height * width
    check_growth(f"{files[0].parent}, with {len(files):,} pictures,", stored, needed)
    x = np.empty((len(files), channels, height, width), dtype=np.uint8)
    for place, path in enumerate(files):
        with _opened(Image, path) as image:
            pixels = np.asarray(image.convert("L" if _is_grey(image) else "RGB"))
            # A grey image among coloured ones is copied to all three channels.
            x[place] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return x


def _shape(image_module: Any, path: Path) -> tuple[int, int, int]:
    """Return 1 or 3 channels, height and width from an image's header."""
    with _opened(image_module, path) as image:
        width, height = image.size
        check_picture(str(path), width, height, len(image.getbands()))
        if image.mode.startswith(("I", "F")):
            raise PefllError(f"{path} has more than 8 bits per channel; save it with 8 bits", code="PEFLL-D155")
        return (1 if _is_grey(image) else 3), height, width


def _is_grey(image: Any) -> bool:
    return image.mode in ("1", "L", "LA")


@contextmanager
def _opened(image_module: Any, path: Path) -> Iterator[Any]:
    """Open an image for the block; PefllError if opening it fails, or reading it inside the block."""
    try:
        with image_module.open(path) as image:
            yield image
    except image_module.DecompressionBombError as error:
        raise PefllError(
            f"{path} has far too many pixels for a sample: {error}; make it smaller", "PEFLL-L004"
        ) from None
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, MemoryError) as error:
        raise PefllError(
            f"{path} cannot be read as an image: {error}; replace or remove it", code="PEFLL-D156"
        ) from None


def state(folder: Path) -> str:
    """Return a SHA-256 of the names, sizes and times of all files that `from_folder` reads, without opening them."""
    digest = hashlib.sha256()
    for line in sorted(_state_lines(str(folder), "", _DEPTH)):
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _state_lines(folder: str, below: str, depth: int) -> Iterator[str]:
    """Yield a line for every folder and image, at most `depth` folders deep. The limit ends loops of links."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if depth and entry.is_dir():
                yield f"{below}{entry.name}/\0"
                yield from _state_lines(entry.path, f"{below}{entry.name}/", depth - 1)
            elif entry.name.lower().endswith(SUFFIXES):
                try:
                    status = entry.stat()
                    yield f"{below}{entry.name}\0{status.st_size} {status.st_mtime_ns}\0"
                except FileNotFoundError:  # a broken link; reading the images reports it
                    yield f"{below}{entry.name}\0"


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )
