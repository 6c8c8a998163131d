import hashlib
import os
import pickle
import warnings

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.data import TEST, TRAIN, cifar, load_samples

from . import layouts


def test_reads_the_official_layout_without_warnings(tmp_path):
    pixels = layouts.cifar10(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = cifar.load_cifar10(tmp_path, checksums=None)
    assert samples.x.shape == (120, 3, 32, 32)
    assert samples.x.dtype == np.uint8
    # A row of the file is 1,024 red values, then green, then blue, each row by row.
    np.testing.assert_array_equal(samples.x[7, 1, 2], pixels[7, 1024 + 64 : 1024 + 96])
    np.testing.assert_array_equal(samples.x[119, 2, 31], pixels[119, -32:])
    assert samples.split.tolist() == [TRAIN] * 100 + [TEST] * 20
    assert samples.y[20:23].tolist() == [1, 2, 3]
    assert samples.class_names[3] == "name3"
    assert samples.client is None


def test_cifar100_has_fine_labels(tmp_path):
    layouts.cifar100(tmp_path)
    samples = cifar.load_cifar100(tmp_path, checksums=None)
    assert samples.classes == 100
    assert samples.y.max() == 99
    assert samples.class_names[42] == "fine42"
    assert (samples.split == TEST).sum() == 100


def test_the_archive_gives_the_same_as_the_folder(tmp_path):
    layouts.cifar10(tmp_path)
    folder = cifar.load_cifar10(tmp_path, checksums=None)
    assert len(cifar.found(cifar.CIFAR10, tmp_path)) == 7
    layouts.archive(tmp_path, "cifar-10-batches-py", "cifar-10-python.tar.gz")
    assert cifar.found(cifar.CIFAR10, tmp_path) == [tmp_path / "cifar-10-python.tar.gz"]
    packed = cifar.load_cifar10(tmp_path, checksums=None)
    np.testing.assert_array_equal(folder.x, packed.x)
    np.testing.assert_array_equal(folder.y, packed.y)
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_checksums(tmp_path):
    layouts.cifar10(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert len(cifar.load_cifar10(tmp_path, checksums=sums).x) == 120
    with pytest.raises(PefllError, match=r"data_batch_1\b.*PEFLL-D119"):
        cifar.load_cifar10(tmp_path)
    damaged = bytearray((folder / "test_batch").read_bytes())
    damaged[-5000] ^= 1
    (folder / "test_batch").write_bytes(damaged)
    with pytest.raises(PefllError, match=r"test_batch.*PEFLL-D119"):
        cifar.load_cifar10(tmp_path, checksums=sums)


def test_missing(tmp_path):
    with pytest.raises(PefllError, match=r"pefll data get cifar10.*PEFLL-D120"):
        cifar.load_cifar10(tmp_path)
    layouts.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(PefllError, match=r"\bdata_batch_3\b.*PEFLL-D118"):
        cifar.load_cifar10(tmp_path)
    layouts.archive(tmp_path, "cifar-10-batches-py", "cifar-10-python.tar.gz")
    with pytest.raises(PefllError, match=r"\bdata_batch_3\b.*PEFLL-D123"):
        cifar.load_cifar10(tmp_path, checksums=None)


@pytest.mark.parametrize("damage", ["empty", "half", "cut short"])
def test_a_folder_that_is_not_whole_beside_a_good_archive(tmp_path, damage, monkeypatch):
    pixels = layouts.cifar10(tmp_path)
    sums = layouts.sign_cifar10(tmp_path, monkeypatch)
    folder, archive = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-10-python.tar.gz"
    kept = (folder / "data_batch_2").read_bytes()
    others = {path.name: path.read_bytes() for path in folder.iterdir()} if damage == "cut short" else {}
    layouts.archive(tmp_path, folder.name, archive.name)
    folder.mkdir()
    for name, content in (others | ({} if damage == "empty" else {"data_batch_2": kept[:3000]})).items():
        (folder / name).write_bytes(content)
    for checksums in (sums, None) if damage != "cut short" else (sums,):
        samples = cifar.load_cifar10(tmp_path, checksums=checksums)
        np.testing.assert_array_equal(samples.x.reshape(120, -1), pixels)
    if damage != "cut short":
        assert cifar.found(cifar.CIFAR10, tmp_path) == [archive]
    assert len(load_samples("cifar10", tmp_path).x) == 120
    # The archive is not believed either.
    with pytest.raises(PefllError, match=r"data_batch_1\b.*tar\.gz.*PEFLL-D121"):
        cifar.load_cifar10(tmp_path, checksums=sums | {"data_batch_1": "0"})


@pytest.mark.parametrize(("archive", "code"), [(False, "PEFLL-D118"), (True, "PEFLL-D123")])
def test_advice_fits_what_is_there(tmp_path, archive, code):
    layouts.cifar10(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    (folder / "data_batch_3").unlink()
    if archive:
        layouts.archive(tmp_path, folder.name, "cifar-10-python.tar.gz")
    with pytest.raises(PefllError, match=rf"data_batch_3.*`pefll data get cifar10`.*{code}"):
        cifar.load_cifar10(tmp_path, checksums=None)


@pytest.mark.parametrize("keep", [0, 1, 100, 20000, -1])
def test_truncated_pickle(tmp_path, keep):
    layouts.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PefllError, match=r"data_batch_2.*PEFLL-D208"):
        cifar.load_cifar10(tmp_path, checksums=None)


@pytest.mark.parametrize("keep", [10, 2000])
def test_truncated_archive(tmp_path, keep):
    layouts.cifar10(tmp_path)
    layouts.archive(tmp_path, "cifar-10-batches-py", "cifar-10-python.tar.gz")
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PefllError, match="PEFLL-D122"):
        cifar.load_cifar10(tmp_path, checksums=None)


class _Hostile:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("call", [os.system, eval, getattr, np.load, np.frombuffer])
def test_hostile_pickles_run_nothing(tmp_path, protocol, call):
    layouts.cifar10(tmp_path)
    mark = tmp_path / "mark"
    content = {b"data": _Hostile(call, f"touch {mark}"), b"labels": []}
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(PefllError, match=r"\basks for\b.*PEFLL-D208"):
        cifar.load_cifar10(tmp_path, checksums=None)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({b"data": 3}, "PEFLL-D124"),
        ({b"data": np.zeros((20, 100), dtype=np.uint8)}, "PEFLL-D124"),
        ({b"labels": 3}, "PEFLL-D125"),
        ({b"labels": [b"1"] * 20}, "PEFLL-D125"),
        ({b"labels": [1] * 19}, r"\b20 images.*\b19 labels.*PEFLL-D126"),
        ({b"labels": [10] * 20}, r"label 10.*PEFLL-D139"),
    ],
)
def test_wrong_content(tmp_path, change, sentence):
    layouts.cifar10(tmp_path)
    content = {b"data": np.zeros((20, 3072), dtype=np.uint8), b"labels": [0] * 20}
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(layouts.old_pickle(content | change))
    with pytest.raises(PefllError, match=sentence):
        cifar.load_cifar10(tmp_path, checksums=None)


def test_not_a_dictionary(tmp_path):
    layouts.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps([1], protocol=2))
    with pytest.raises(PefllError, match=r"a list.*PEFLL-D209"):
        cifar.load_cifar10(tmp_path, checksums=None)


@pytest.mark.parametrize("array", [np.zeros((20, 3072)), np.array([{}] * 20, dtype=object), np.zeros(3, dtype="u1,u1")])
def test_arrays_of_other_kinds_are_refused(tmp_path, array):
    layouts.cifar10(tmp_path)
    content = {b"data": array, b"labels": [0] * 20}
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(PefllError, match=r"data_batch_1.*PEFLL-D208"):
        cifar.load_cifar10(tmp_path, checksums=None)


def test_columns_first(tmp_path):
    layouts.cifar10(tmp_path)
    pixels = np.asfortranarray(np.arange(20 * 3072, dtype=np.uint32).reshape(20, 3072).astype(np.uint8))
    content = {b"data": pixels, b"labels": [0] * 20}
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    samples = cifar.load_cifar10(tmp_path, checksums=None)
    np.testing.assert_array_equal(samples.x[:20].reshape(20, -1), pixels)
