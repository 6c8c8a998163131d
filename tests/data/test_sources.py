"""Names, cache and check."""

import json
import os
import shutil
import warnings

import numpy as np
import pandas
import pytest
from PIL import Image

from pefll.core.errors import PefllError
from pefll.data import (
    DATASETS,
    cache,
    check,
    folders,
    load_samples,
    make_federation,
    read_samples,
    samples_from_arrays,
)

from . import layouts


@pytest.fixture
def folder(tmp_path):
    layouts.femnist(tmp_path)
    return tmp_path


def same(one, two):
    for name in ("x", "y", "split", "client"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        assert getattr(getattr(one, name), "dtype", None) == getattr(getattr(two, name), "dtype", None)
    for name in ("classes", "normalise", "name", "class_names", "client_names", "tokens", "feature_names"):
        assert getattr(one, name) == getattr(two, name)


def test_the_cache_gives_the_same_and_does_not_parse_again(folder, monkeypatch):
    said = []
    direct = DATASETS["femnist"].load(folder)
    first = load_samples("femnist", folder, said.append)
    assert len(said) == 2
    assert isinstance(first.x, np.memmap)
    # Only for this call: NumPy's own testing module also reads JSON, when it is first used.
    with monkeypatch.context() as patch:
        patch.setattr("json.loads", _only_manifests(json.loads))
        second = load_samples("femnist", folder, said.append)
    assert len(said) == 2
    same(direct, first)
    same(direct, second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_federation(second, partition="natural", clients=None, seed=0)


def _only_manifests(loads):
    def guarded(text):
        content = loads(text)
        assert "user_data" not in content
        return content

    return guarded


def test_a_changed_source_file_is_noticed(folder):
    load_samples("femnist", folder)
    path = folder / "femnist/test/all_data_0_niid_0_keep_0_test_9.json"
    path.unlink()
    assert len(load_samples("femnist", folder).x) == 60
    layouts.femnist(folder, writers=2)
    fresh = load_samples("femnist", folder)
    same(DATASETS["femnist"].load(folder), fresh)
    os.utime(path, ns=(1, 1))
    said = []
    load_samples("femnist", folder, said.append)
    assert said


@pytest.mark.parametrize("damage", ["truncate", "append", "remove", "manifest", "deep", "header", "labels"])
def test_a_damaged_entry_is_made_again(folder, damage):
    clean = load_samples("femnist", folder)
    entry = folder / ".pefll-cache/femnist"
    if damage == "truncate":
        (entry / "x.npy").write_bytes((entry / "x.npy").read_bytes()[:-1])
    elif damage == "append":
        (entry / "x.npy").write_bytes((entry / "x.npy").read_bytes() + b"more")
    elif damage == "remove":
        (entry / "y.npy").unlink()
    elif damage == "manifest":
        (entry / "manifest.json").write_text("{")
    elif damage == "deep":
        (entry / "manifest.json").write_text("[" * 100_000)
    elif damage == "header":
        whole = (entry / "x.npy").read_bytes()
        (entry / "x.npy").write_bytes(bytes(10) + whole[10:])
    else:
        whole = (entry / "y.npy").read_bytes()
        (entry / "y.npy").write_bytes(whole[:-8] + b"\xff" * 8)
    said = []
    same(DATASETS["femnist"].load(folder), load_samples("femnist", folder, said.append))
    assert said
    assert cache.intact("femnist", folder)
    assert len(clean.x) == 78
    assert [path.name for path in (folder / ".pefll-cache").iterdir()] == ["femnist"]


def test_without_a_place_for_the_cache(folder):
    (folder / ".pefll-cache").write_text("a file is in the way")
    said = []
    assert len(load_samples("femnist", folder, said.append).x) == 78
    assert "cannot be written" in said[-1]


def test_a_moved_folder_keeps_its_cache(folder, tmp_path_factory):
    load_samples("femnist", folder)
    other = tmp_path_factory.mktemp("other") / "data"
    shutil.copytree(folder, other)
    said = []
    load_samples("femnist", other, said.append)
    assert said == []


def test_names_and_paths(tmp_path):
    assert len(load_samples("digits", tmp_path).x) == 1797
    assert list(tmp_path.iterdir()) == []
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    assert load_samples(str(tmp_path / "mine.npz"), tmp_path).classes == 2
    with pytest.raises(PefllError, match=r"data set 'cifar1O'.*'cifar10'.*PEFLL-A101"):
        load_samples("cifar1O", tmp_path)
    with pytest.raises(PefllError, match="PEFLL-D178"):
        load_samples("absent.npz", tmp_path)
    with pytest.raises(PefllError, match=r"pefll data get cifar10.*PEFLL-D120"):
        load_samples("cifar10", tmp_path)


def test_check(folder):
    layouts.cifar10(folder)
    (folder / "shakespeare").mkdir()
    (folder / "shakespeare/roles.jsonl").write_text("{")
    said = []
    states = {finding.name: finding.state for finding in check(folder, said.append)}
    assert states == {
        "digits": "ok",
        "cifar10": "damaged",
        "cifar100": "missing",
        "femnist": "ok",
        "mnist_writers": "missing",
        "shakespeare": "damaged",
        "shakespeare_tenth": "damaged",
    }
    assert len(said) == len(DATASETS)
    (sentence,) = [finding.sentence for finding in check(folder) if finding.name == "femnist"]
    assert sentence == "78 samples, 62 classes (15, 16, 17, 18, 19 and 42 more have no sample), 6 clients"
    with pytest.raises(PefllError, match="PEFLL-D117"):
        check(folder / "absent")


def test_check_tells_of_an_unfinished_download(tmp_path):
    part = tmp_path / "cifar-10-python.tar.gz.part"
    part.write_bytes(b"half")
    (tmp_path / "cifar-10-batches-py").mkdir()
    found = {finding.name: finding for finding in check(str(tmp_path))}
    assert found["cifar10"].state == "damaged"
    assert found["cifar10"].sentence == f"the download {part} is not complete; go on with `pefll data get cifar10`"
    assert found["cifar100"].state == "missing"
    layouts.cifar10(tmp_path / "other")
    (tmp_path / "other/cifar-10-batches-py/test_batch").rename(tmp_path / "cifar-10-batches-py/test_batch")
    found = {finding.name: finding for finding in check(tmp_path)}
    assert found["cifar10"].state == "damaged"
    assert "lacks data_batch_1" in found["cifar10"].sentence
    assert f"{part} is not complete" in found["cifar10"].sentence


def test_check_of_good_files_beside_an_unfinished_download(tmp_path, monkeypatch):
    layouts.cifar10(tmp_path)
    layouts.sign_cifar10(tmp_path, monkeypatch)
    (tmp_path / "cifar-10-python.tar.gz.part").write_bytes(b"half")
    (finding,) = [finding for finding in check(tmp_path) if finding.name == "cifar10"]
    assert finding.state == "ok"
    assert finding.sentence.endswith(".part is left over from a download and can be deleted")


def test_check_finds_a_flipped_bit_in_the_cache(folder):
    assert cache.intact("femnist", folder) is None
    load_samples("femnist", folder)
    assert cache.intact("femnist", folder) is True
    path = folder / ".pefll-cache/femnist/x.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (sentence,) = [finding.sentence for finding in check(folder) if finding.name == "femnist"]
    assert "its cache was damaged" in sentence
    assert cache.intact("femnist", folder) is None
    load_samples("femnist", folder)
    (folder / ".pefll-cache/femnist/manifest.json").write_text("[]")
    assert cache.intact("femnist", folder) is False


def test_every_source_is_described():
    for name, source in DATASETS.items():
        assert source.name == name
        assert source.about
        assert source.origin
        assert source.embedded == (name == "digits")


def test_arrays_without_split_and_clients_are_cached(tmp_path):
    (tmp_path / "source").write_text("x")
    built = samples_from_arrays(np.ones((4, 2)), ["a", "b", "a", "b"])
    for _ in range(2):
        samples = cache.cached("mine", tmp_path, cache.stamp_of([tmp_path / "source"], tmp_path), lambda: built)
        assert samples.split is None
        assert samples.client is None
        assert samples.class_names == ("a", "b")
        assert samples.normalise is None


def _write_table(path, rows=12):
    frame = pandas.DataFrame({"b": np.arange(rows) / 7, "a": np.arange(rows)})
    frame["label"], frame["kind"] = np.arange(rows) % 3, ["cat", "dog"] * (rows // 2)
    frame["client"], frame["user"] = np.arange(rows) // 3, np.arange(rows) // 2
    frame = frame.drop(columns="kind") if "plain" in path.name else frame.drop(columns="label")
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)


def _write_images(folder, count=3):
    for client in ("ann", "bob"):
        for kind in ("cat", "dog"):
            (folder / client / kind).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(np.full((4, 5), number, np.uint8)).save(folder / client / kind / f"{number}.png")


def _never(*_, **__):
    raise AssertionError("it is read again")


@pytest.mark.parametrize("what", ["plain.csv", "plain.parquet", "pictures"])
def test_own_files_are_read_once(tmp_path, monkeypatch, what):
    path, data = tmp_path / "own" / what, tmp_path / "data"
    path.parent.mkdir()
    _write_images(path) if what == "pictures" else _write_table(path)
    said = []
    first = load_samples(path, data, said.append)
    (entry,) = (data / ".pefll-cache").iterdir()
    assert entry.name.startswith("own-")
    assert said == [f"reading {path}", f"keeping it in {entry} for the next time"]
    with monkeypatch.context() as patch:
        patch.setattr("pefll.data.user_files.read_samples", _never)
        second = load_samples(str(path), str(data), said.append)
        # By another way of writing the same path, too.
        monkeypatch.chdir(tmp_path / "own")
        same(load_samples(f"./{what}", data, said.append), first)
    assert len(said) == 2
    assert isinstance(second.x, np.memmap)
    same(first, second)
    same(read_samples(path), second)
    if what != "pictures":
        assert second.feature_names == ("b", "a", "user")


@pytest.mark.parametrize("change", ["more", "less", "touched", "renamed", "new folder"])
def test_a_changed_folder_is_noticed(tmp_path, change):
    path = tmp_path / "pictures"
    _write_images(path)
    load_samples(path, tmp_path / "data")
    one = path / "ann/cat/0.png"
    if change == "more":
        _write_images(path, 4)
    elif change == "less":
        one.unlink()
    elif change == "touched":
        os.utime(one, ns=(1, 1))
    elif change == "renamed":
        one.rename(path / "ann/cat/9.png")
    else:
        (path / "cat").mkdir()
    said = []
    same(read_samples(path), load_samples(path, tmp_path / "data", said.append))
    assert said
    # What is not read may change.
    (path / "ann/cat/notes.txt").write_text("notes")
    (path / "ann/.hidden.png").write_text("hidden")
    said.clear()
    load_samples(path, tmp_path / "data", said.append)
    assert said == []


def test_a_changed_table_and_other_columns_are_noticed(tmp_path):
    path = tmp_path / "t.csv"
    _write_table(path)
    assert load_samples(path, tmp_path, label="kind").class_names == ("cat", "dog")
    assert load_samples(path, tmp_path, label="kind").client.max() == 3
    by_user = load_samples(path, tmp_path, label="kind", client="user")
    assert by_user.client.max() == 5
    assert by_user.feature_names == ("b", "a", "client")
    with pytest.raises(PefllError, match=r"column 'label'.*PEFLL-D176"):
        load_samples(path, tmp_path)
    _write_table(path, 24)
    assert len(load_samples(path, tmp_path, label="kind").x) == 24


def test_own_arrays_are_not_copied_to_the_cache(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    load_samples(tmp_path / "mine.npz", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_the_cache_forgets_what_is_gone(tmp_path):
    one, two, data = tmp_path / "plain1.csv", tmp_path / "plain2.csv", tmp_path / "data"
    layouts.femnist(data)
    for name in (one, two):
        _write_table(name)
        load_samples(name, data)
    load_samples("femnist", data)
    assert len(list((data / ".pefll-cache").iterdir())) == 3
    one.unlink()
    _write_table(two, 24)
    load_samples(two, data)
    left = sorted(path.name for path in (data / ".pefll-cache").iterdir())
    assert len(left) == 2
    assert left[0] == "femnist"
    with pytest.raises(PefllError, match="PEFLL-D178"):
        load_samples(one, data)


def test_links_to_nowhere_and_in_circles(tmp_path):
    path = tmp_path / "pictures"
    _write_images(path)
    (path / "ann/cat/loop").symlink_to(path)
    before = folders.state(path)
    (path / "ann/cat/gone.png").symlink_to(tmp_path / "nowhere.png")
    assert folders.state(path) != before
    with pytest.raises(PefllError, match="PEFLL-D156"):
        load_samples(path, tmp_path / "data")


def test_the_data_folder_has_a_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layouts.femnist(tmp_path / "data")
    assert len(load_samples("femnist").x) == 78
    assert len(load_samples("femnist", "data").x) == 78
