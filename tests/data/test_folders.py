"""Folders of images: client/class/*.png, and one client's class/*.png."""

import sys

import numpy as np
import pytest
from PIL import Image

from pefll.core.errors import PefllError
from pefll.data import load_samples, read_client, read_samples


def _save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_folder_of_images(tmp_path):
    random = np.random.default_rng(0)
    pixels = {}
    for client in ("ann", "bob"):
        for kind in ("cat", "dog"):
            for number in range(3):
                pixels[client, kind, number] = random.integers(0, 256, (6, 5, 3), dtype=np.uint8)
                _save(tmp_path / "set" / client / kind / f"{number}.png", pixels[client, kind, number])
    (tmp_path / "set" / "README.txt").write_text("not an image")
    (tmp_path / "set" / "ann" / "cat" / "notes.txt").write_text("not an image")
    samples = read_samples(tmp_path / "set")
    assert samples.x.shape == (12, 3, 6, 5)
    assert samples.class_names == ("cat", "dog")
    assert samples.client_names == ("ann", "bob")
    row = np.flatnonzero((samples.client == 1) & (samples.y == 0))[2]
    np.testing.assert_array_equal(samples.x[row], pixels["bob", "cat", 2].transpose(2, 0, 1))
    assert samples.split is None
    x, y = read_client(tmp_path / "set" / "ann", class_names=("dog", "cat"))
    assert y.tolist() == [1, 1, 1, 0, 0, 0]
    np.testing.assert_array_equal(x[4], pixels["ann", "dog", 1].transpose(2, 0, 1))
    with pytest.raises(PefllError, match=r"class 'dog'.*cat and emu.*PEFLL-D108"):
        read_client(tmp_path / "set" / "ann", class_names=("cat", "emu"))
    with pytest.raises(PefllError, match=r"class 'cat'.*whole numbers.*PEFLL-D108"):
        read_client(tmp_path / "set" / "ann")


def test_folder_by_split_and_of_grey_and_coloured_images(tmp_path):
    for split in ("train", "test"):
        for client in ("1", "2"):
            _save(tmp_path / split / client / "7" / "a.png", np.full((4, 4), 9, np.uint8))
    samples = read_samples(tmp_path)
    assert samples.x.shape == (4, 1, 4, 4)
    assert sorted(samples.split) == [0, 0, 2, 2]
    _save(tmp_path / "test" / "2" / "7" / "b.png", np.full((4, 4, 3), 9, np.uint8))
    samples = read_samples(tmp_path)
    assert samples.x.shape == (5, 3, 4, 4)
    assert (samples.x == 9).all()
    assert read_client(tmp_path / "train" / "1")[1].tolist() == [7]


def test_folders_of_other_layouts(tmp_path):
    def said(read):
        with pytest.raises(PefllError) as error:
            read(tmp_path)
        return str(error.value)

    layouts = ((read_samples, "client/class/", "ann/cat/1.png"), (read_client, "class/", "cat/1.png"))
    for read, layout, example in layouts:
        sentence = said(read)
        assert f" {layout};" in sentence
        assert f"such as {tmp_path}/{example};" in sentence
        assert sentence.endswith("; found no file at all [PEFLL-D152]")
    for name in ("b.png", "a.png"):
        _save(tmp_path / name, np.zeros((4, 4), np.uint8))
    assert said(read_client).endswith("; found a.png and b.png [PEFLL-D152]")
    for name in ("b.png", "a.png"):
        (tmp_path / name).rename(tmp_path / f".{name}")
    for number in range(3):
        _save(tmp_path / "bob" / "dog" / f"{number}.png", np.zeros((4, 4), np.uint8))
    several = said(read_client)  # several clients' folders in place of one's
    assert several.endswith("; found bob/dog/0.png and bob/dog/1.png [PEFLL-D152]")


def test_columns_of_data_that_has_none(tmp_path):
    _save(tmp_path / "ann" / "cat" / "1.png", np.zeros((4, 4), np.uint8))
    for read in (read_samples, read_client):
        with pytest.raises(PefllError, match=r"omit label='species'.*PEFLL-D181"):
            read(tmp_path, label="species")
    for source in ("digits", tmp_path):
        with pytest.raises(PefllError, match=r"omit client='writer'.*PEFLL-D181"):
            load_samples(source, tmp_path / "data", client="writer")


def test_bad_images(tmp_path, monkeypatch):
    one, two = tmp_path / "a" / "b" / "1.png", tmp_path / "a" / "b" / "2.png"
    _save(one, np.zeros((4, 4, 3), np.uint8))
    _save(two, np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(PefllError, match=r"5x4 pixels but .* 4x4.*PEFLL-D154"):
        read_samples(tmp_path)
    two.write_bytes(one.read_bytes()[:40])
    with pytest.raises(PefllError, match=r"2\.png.*PEFLL-D156"):
        read_samples(tmp_path)
    _save(two, np.zeros((4, 4), np.uint16))
    with pytest.raises(PefllError, match="PEFLL-D155"):
        read_samples(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PefllError, match="PEFLL-D153"):
        read_samples(tmp_path)
