"""CIFAR-10 and CIFAR-100 from their official files, unpacked or in the archive."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.samples import TEST, TRAIN, Array, Normalise, Samples
from pefll.data.unpickle import read_pickle

# Published md5 sums of the official files.
CHECKSUMS_10: Mapping[str, str] = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
CHECKSUMS_100: Mapping[str, str] = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}


class Layout(NamedTuple):
    """Names and keys of the files of one data set, and the channel statistics of its training images."""

    name: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str  # file with the class names
    label: bytes  # key of the labels
    label_names: bytes  # key of the class names
    classes: int
    normalise: Normalise

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files to read."""
        return (*self.train, self.test, self.meta)


CIFAR10 = Layout(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    label=b"labels",
    label_names=b"label_names",
    classes=10,
    normalise=Normalise((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
)
CIFAR100 = Layout(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train=("train",),
    test="test",
    meta="meta",
    label=b"fine_labels",
    label_names=b"fine_label_names",
    classes=100,
    normalise=Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)


def load_cifar10(data_dir: Path, checksums: Mapping[str, str] | None = CHECKSUMS_10) -> Samples:
    """Return CIFAR-10: uint8 [60000, 3, 32, 32], 50,000 train and 10,000 test.

    `checksums` has the md5 of each file; None accepts files that are not official.
    """
    return _load(CIFAR10, data_dir, checksums)


def load_cifar100(data_dir: Path, checksums: Mapping[str, str] | None = CHECKSUMS_100) -> Samples:
    """Return CIFAR-100 with its fine labels: uint8 [60000, 3, 32, 32], 50,000 train and 10,000 test.

    `checksums` has the md5 of each file; None accepts files that are not official.
    """
    return _load(CIFAR100, data_dir, checksums)


def found(layout: Layout, data_dir: Path) -> list[Path]:
    """Return the files to load: those in the folder; or the archive, if it exists and some files are missing."""
    there = [path for name in layout.files if (path := data_dir / layout.folder / name).is_file()]
    archive = data_dir / layout.archive
    return [archive] if len(there) < len(layout.files) and archive.is_file() else there


def _load(layout: Layout, data_dir: Path, checksums: Mapping[str, str] | None) -> Samples:
    raw, source = _read_files(layout, data_dir, checksums)
    images, labels, split = [], [], []
    for name in (*layout.train, layout.test):
        # `pop` removes the file's bytes from the dictionary, which frees their memory.
        x, y = _parse(layout, raw.pop(name), f"{source}/{name}")
        images.append(x)
        labels.append(y)
        split.append(np.full(len(x), TEST if name == layout.test else TRAIN, dtype=np.int8))
    return Samples(
        x=np.concatenate(images),
        y=np.concatenate(labels),
        classes=layout.classes,
        split=np.concatenate(split),
        normalise=layout.normalise,
        name=layout.name,
        class_names=_class_names(layout, raw.pop(layout.meta), f"{source}/{layout.meta}"),
    )


def _read_files(layout: Layout, data_dir: Path, checksums: Mapping[str, str] | None) -> tuple[dict[str, bytes], Path]:
    """Return the bytes of every file, and the folder or archive that they are from.

    If the folder has missing or damaged files, the archive is read.
    """
    folder, archive = data_dir / layout.folder, data_dir / layout.archive
    get = f"run `pefll data get {layout.name}`"
    if folder.is_dir():
        raw = {name: (folder / name).read_bytes() for name in layout.files if (folder / name).is_file()}
        missing = [name for name in layout.files if name not in raw]
        wrong = _with_wrong_md5(raw, checksums)
        if not missing and not wrong:
            return raw, folder
        if not archive.is_file():
            if missing:
                raise PefllError(f"{layout.name}: {folder} lacks {', '.join(missing)}; {get}", code="PEFLL-D118")
            raise PefllError(
                f"{layout.name}: {folder / wrong[0]} is not the official file (wrong md5); delete it and {get}",
                code="PEFLL-D119",
            )
        del raw
    if not archive.is_file():
        raise PefllError(f"{layout.name}: there is neither {folder} nor {archive}; {get}", code="PEFLL-D120")
    raw = _unpack(layout, archive)
    wrong = _with_wrong_md5(raw, checksums)
    if wrong:
        raise PefllError(
            f"{layout.name}: {wrong[0]} in {archive} is not the official file (wrong md5); delete it and {get}",
            code="PEFLL-D121",
        )
    return raw, archive


def _with_wrong_md5(raw: Mapping[str, bytes], checksums: Mapping[str, str] | None) -> list[str]:
    """Return the names of the files with a wrong md5."""
    sums = {name: hashlib.md5(data, usedforsecurity=False).hexdigest() for name, data in raw.items()}
    return [name for name, md5 in sums.items() if checksums is not None and md5 != checksums[name]]


def _unpack(layout: Layout, archive: Path) -> dict[str, bytes]:
    """Return the bytes of the files in the archive."""
    wanted = {f"{layout.folder}/{name}": name for name in layout.files}
    raw: dict[str, bytes] = {}
    try:
        # The archive is read in one pass, since random access to it is slow. Nothing is written to disk.
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.name in wanted and member.isfile() else None
                if stream is not None:
                    raw[wanted[member.name]] = stream.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise PefllError(
            f"{layout.name}: {archive} is damaged ({error}); delete it and run `pefll data get {layout.name}`",
            code="PEFLL-D122",
        ) from None
    missing = [name for name in layout.files if name not in raw]
    if missing:
        raise PefllError(
            f"{layout.name}: {archive} lacks {', '.join(missing)}; delete it and run `pefll data get {layout.name}`",
            code="PEFLL-D123",
        )
    return raw


def _parse(layout: Layout, data: bytes, where: str) -> tuple[Array, Array]:
    """Return pixels uint8 [n, 3, 32, 32] and labels int64 [n] of one file."""
    content = read_pickle(data, where)
    pixels, labels = content.get(b"data"), content.get(layout.label)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        raise PefllError(f"{where} has no uint8 pixels of shape [n, 3072] under the key 'data'", code="PEFLL-D124")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise PefllError(f"{where} has no list of labels under the key {layout.label.decode()!r}", code="PEFLL-D125")
    if len(labels) != len(pixels):
        raise PefllError(f"{where} has {len(pixels):,} images but {len(labels):,} labels", code="PEFLL-D126")
    return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.int64)


def _class_names(layout: Layout, data: bytes, where: str) -> tuple[str, ...]:
    names: Any = read_pickle(data, where).get(layout.label_names)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise PefllError(f"{where} has no class names under the key {layout.label_names.decode()!r}", code="PEFLL-D127")
    return tuple(name.decode("utf-8", "replace") for name in names)
