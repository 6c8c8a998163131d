"""Small files in the layouts of the official ones."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from pefll.data import Samples
from pefll.data.cifar import CIFAR10, load_cifar10

rng = np.random.default_rng(7)


def _short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def old_pickle(content: dict[bytes, object]) -> bytes:
    """A pickle as Python 2 and an old NumPy wrote them: byte strings, and arrays made by numpy.core.multiarray."""

    def write(value: object) -> bytes:
        if isinstance(value, bytes):
            return _short(value) if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, list):
            return b"](" + b"".join(write(each) for each in value) + b"e"
        assert isinstance(value, np.ndarray)
        # The state of a dtype: version 3, order of bytes, three times None, twice -1, 0.
        state = b"(K\x03" + _short(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00t"
        dtype = b"cnumpy\ndtype\n(" + _short(b"u1") + b"K\x00K\x01tR" + state + b"b"
        array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + _short(b"b") + b"tR"
        shape = b"(" + b"".join(write(size) for size in value.shape) + b"t"
        return array + b"(K\x01" + shape + dtype + b"\x89" + write(value.tobytes()) + b"tb"

    return b"\x80\x02}(" + b"".join(write(key) + write(value) for key, value in content.items()) + b"u."


def cifar10(folder: Path, each: int = 20) -> np.ndarray:
    """Write cifar-10-batches-py with `each` images per file; return all pixels."""
    out = folder / "cifar-10-batches-py"
    out.mkdir(parents=True)
    everything = []
    for number, file in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = rng.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels = [(number + place) % 10 for place in range(each)]
        content = {b"batch_label": b"x", b"labels": labels, b"data": pixels, b"filenames": [b"a.png"] * each}
        (out / file).write_bytes(old_pickle(content))
        everything.append(pixels)
    names = [f"name{i}".encode() for i in range(10)]
    (out / "batches.meta").write_bytes(old_pickle({b"label_names": names, b"num_vis": 3072}))
    return np.concatenate(everything)


def sign_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the files in cifar-10-batches-py pass for the official ones."""
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (folder / CIFAR10.folder).iterdir()}
    monkeypatch.setattr(load_cifar10, "__defaults__", (sums,))
    return sums


def cifar100(folder: Path) -> None:
    out = folder / "cifar-100-python"
    out.mkdir(parents=True)
    for file, count in (("train", 200), ("test", 100)):
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        fine, coarse = [i % 100 for i in range(count)], [i % 20 for i in range(count)]
        content = {b"filenames": [], b"fine_labels": fine, b"coarse_labels": coarse, b"data": pixels}
        # As a Python of today writes them: numpy._core and _codecs.encode appear.
        (out / file).write_bytes(pickle.dumps(content, protocol=2))
    names = [f"fine{i}".encode() for i in range(100)]
    (out / "meta").write_bytes(old_pickle({b"fine_label_names": names, b"coarse_label_names": [b"c"] * 20}))


def archive(folder: Path, inside: str, name: str) -> None:
    """Pack a folder as its official archive is, and remove it."""
    with tarfile.open(folder / name, "w:gz") as tar:
        tar.add(folder / inside, arcname=inside)
    for path in (folder / inside).iterdir():
        path.unlink()
    (folder / inside).rmdir()


def leaf_json(path: Path, samples: dict[str, tuple[list, list]], **changes: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(samples),
        "num_samples": [len(y) for _, y in samples.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in samples.items()},
    }
    path.write_text(json.dumps(content | changes))


def femnist(folder: Path, writers: int = 6) -> None:
    """Two shards of training writers and one of test."""
    for split, shards, count in (("train", 2, 10), ("test", 1, 3)):
        for shard in range(shards):
            users = {}
            for writer in range(writers):
                if writer % shards == shard:
                    x = np.round(rng.integers(0, 256, (count, 784)) / 255, 4).tolist()
                    users[f"f{writer:04}"] = (x, [(writer + i) % 62 for i in range(count)])
            leaf_json(folder / "femnist" / split / f"all_data_{shard}_niid_0_keep_0_{split}_9.json", users)


def cifar_sized(classes: int) -> Samples:
    """The labels and the split of CIFAR, without its pixels."""
    y = np.concatenate([np.arange(50000) % classes, np.arange(10000) % classes])
    split = np.repeat(np.array([0, 2], dtype=np.int8), [50000, 10000])
    return Samples(x=np.zeros((60000, 1), dtype=np.uint8), y=y, classes=classes, split=split, name="cifar-sized")
