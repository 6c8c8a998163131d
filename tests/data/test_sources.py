"""Names, cache and check."""

import json
import os
import shutil
import warnings

import numpy as np
import pytest

from pefll.data import DATASETS, cache, check, load_samples, make_federation, samples_from_arrays
from pefll.errors import PefllError

from . import layouts


@pytest.fixture
def folder(tmp_path):
    layouts.femnist(tmp_path)
    return tmp_path


def same(one, two):
    for name in ("x", "y", "split", "client"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        assert getattr(one, name).dtype == getattr(two, name).dtype
    for name in ("classes", "normalise", "name", "class_names", "client_names", "tokens"):
        assert getattr(one, name) == getattr(two, name)


def test_the_cache_gives_the_same_and_does_not_parse_again(folder, monkeypatch):
    said = []
    direct = DATASETS["femnist"].load(folder)
    first = load_samples("femnist", folder, said.append)
    assert len(said) == 2
    assert isinstance(first.x, np.memmap)
    monkeypatch.setattr("json.loads", _only_manifests(json.loads))
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


@pytest.mark.parametrize("damage", ["truncate", "append", "remove", "manifest", "header", "labels"])
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
    with pytest.raises(PefllError, match="unknown data set 'cifar1O': did you mean 'cifar10'"):
        load_samples("cifar1O", tmp_path)
    with pytest.raises(PefllError, match="no file or folder"):
        load_samples("absent.npz", tmp_path)
    with pytest.raises(PefllError, match="pefll data get cifar10"):
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
    }
    assert len(said) == len(DATASETS)
    (sentence,) = [finding.sentence for finding in check(folder) if finding.name == "femnist"]
    assert sentence == "78 samples, 62 classes, 6 clients"
    with pytest.raises(PefllError, match="there is no folder"):
        check(folder / "absent")


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
        samples = cache.cached("mine", tmp_path, [tmp_path / "source"], lambda: built)
        assert samples.split is None
        assert samples.client is None
        assert samples.class_names == ("a", "b")
        assert samples.normalise is None
