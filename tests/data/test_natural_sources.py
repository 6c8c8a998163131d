"""The data sets that name their clients: FEMNIST, MNIST by writer, Shakespeare; and digits."""

import json
import os
from itertools import pairwise

import numpy as np
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.data import TEST, TRAIN, VALIDATION, digits, femnist, mnist_writers, natural, shakespeare

from . import layouts


def test_digits_are_scaled_to_bytes():
    samples = digits.load("nowhere")
    assert (samples.classes, samples.class_names) == (10, ()), "labels that are whole numbers have no names"
    assert samples.x.shape == (1797, 1, 8, 8)
    assert samples.x.dtype == np.uint8
    assert samples.x.max() == 255
    # It is not known yet which of them training may look at.
    assert samples.normalise is None
    assert samples.split is None
    assert samples.client is None


def test_femnist_gives_the_values_of_the_json_on_white_paper(tmp_path):
    layouts.femnist(tmp_path)
    samples = femnist.load(tmp_path)
    assert samples.x.shape == (6 * 13, 1, 32, 32)
    assert samples.classes == 62
    federation = natural(samples, seed=0, unseen=0)
    seen = federation.prepare(federation.x, torch.float32).numpy()
    shard = json.loads((tmp_path / "femnist/train/all_data_0_niid_0_keep_0_train_9.json").read_text())
    first = np.array(shard["user_data"]["f0000"]["x"][0]).reshape(28, 28)
    np.testing.assert_allclose(seen[0, 0, 2:30, 2:30], first, atol=6e-5)
    border = seen.copy()
    border[:, :, 2:30, 2:30] = 1
    assert (border == 1).all()


def test_femnist_joins_a_writer_over_shards_and_splits(tmp_path):
    layouts.femnist(tmp_path)
    samples = femnist.load(tmp_path)
    assert len(samples.client_names) == 6
    for writer in range(6):
        mine = samples.client == samples.client_names.index(f"f{writer:04}")
        assert (samples.split[mine] == TRAIN).sum() == 10
        assert (samples.split[mine] == TEST).sum() == 3
        assert samples.y[mine & (samples.split == TEST)].tolist() == [writer, writer + 1, writer + 2]
    assert samples.class_names[10] == "A"
    assert samples.class_names[36] == "a"


PIXELS = [[0.5] * 784]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"users": None}, r"'users'.*PEFLL-D165"),
        ({"num_samples": [2]}, r"\b2\b.*PEFLL-D168"),
        ({"num_samples": [1, 1]}, "PEFLL-D166"),
        ({"user_data": {}}, r"user 'a'.*PEFLL-D167"),
        ({"user_data": {"a": {"x": PIXELS}}}, "PEFLL-D167"),
        ({"user_data": {"a": {"x": [[0.5] * 783], "y": [1]}}}, "PEFLL-D149"),
        ({"user_data": {"a": {"x": [["black"] * 784], "y": [1]}}}, "PEFLL-D149"),
        ({"user_data": {"a": {"x": [[1.5] * 784], "y": [1]}}}, "PEFLL-D150"),
        ({"user_data": {"a": {"x": [[float("nan")] * 784], "y": [1]}}}, "PEFLL-D150"),
        ({"user_data": {"a": {"x": PIXELS, "y": [62]}}}, "PEFLL-D151"),
        ({"user_data": {"a": {"x": PIXELS, "y": ["A"]}}}, "PEFLL-D151"),
    ],
)
def test_femnist_damaged(tmp_path, changes, sentence):
    layouts.leaf_json(tmp_path / "femnist/train/a.json", {"a": (PIXELS, [1])}, **changes)
    with pytest.raises(PefllError, match=sentence):
        femnist.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "PEFLL-D004"), ('{"users": [', "PEFLL-D004"), ("[1, 2]", "PEFLL-D164"), ("[" * 100_000, "PEFLL-D004")],
)
def test_femnist_not_json(tmp_path, text, code):
    (tmp_path / "femnist/train").mkdir(parents=True)
    (tmp_path / "femnist/train/a.json").write_text(text)
    with pytest.raises(PefllError, match=rf"a\.json.*{code}"):
        femnist.load(tmp_path)


def test_a_leaf_file_that_does_not_fit_into_memory_is_not_read(tmp_path, monkeypatch):
    layouts.femnist(tmp_path)
    monkeypatch.setattr("pefll.data.limits.available_memory", lambda: 100_000)
    with pytest.raises(PefllError) as refused:
        femnist.load(tmp_path)
    assert refused.value.code == "PEFLL-L003"


def test_a_pipe_is_no_leaf_file(tmp_path):
    (tmp_path / "femnist/train").mkdir(parents=True)
    os.mkfifo(tmp_path / "femnist/train/a.json")
    with pytest.raises(PefllError, match="PEFLL-D148"):
        femnist.load(tmp_path)


def test_femnist_absent(tmp_path):
    with pytest.raises(PefllError, match="PEFLL-D148"):
        femnist.load(tmp_path)


def _write_writers(folder, **changes):
    (folder / "mnist_writers").mkdir()
    arrays = {
        "images": np.arange(5 * 784).reshape(5, 28, 28).astype(np.uint8),
        "labels": np.array([1, 2, 3, 4, 9], dtype=np.uint8),
        "writer_id": np.array([2599, 7, 2599, 30, 7], dtype=np.int32),
        "is_test": np.array([1, 0, 1, 0, 0], dtype=np.uint8),
    }
    np.savez(folder / "mnist_writers/mnist_by_writer.npz", **(arrays | changes))


def test_mnist_writers(tmp_path):
    _write_writers(tmp_path)
    samples = mnist_writers.load(tmp_path)
    assert samples.x.shape == (5, 1, 28, 28)
    assert samples.client.tolist() == [2, 0, 2, 1, 0]
    assert samples.client_names == ("7", "30", "2599")
    assert samples.split is None
    assert mnist_writers.found(tmp_path) == [tmp_path / "mnist_writers/mnist_by_writer.npz"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"images": np.zeros((5, 28, 28))}, "PEFLL-D170"),
        ({"images": np.zeros((5, 32, 32), dtype=np.uint8)}, "PEFLL-D170"),
        ({"writer_id": np.array(["a"] * 5)}, "PEFLL-D171"),
        ({"writer_id": np.zeros(4, dtype=int)}, "PEFLL-D171"),
        ({"labels": np.zeros(5)}, "PEFLL-D172"),
        ({"labels": np.zeros(4, dtype=int)}, "PEFLL-D135"),
        ({"labels": np.full(5, 10)}, "PEFLL-D139"),
    ],
)
def test_mnist_writers_damaged(tmp_path, changes, code):
    _write_writers(tmp_path, **changes)
    with pytest.raises(PefllError, match=code):
        mnist_writers.load(tmp_path)


def test_mnist_writers_absent(tmp_path):
    with pytest.raises(PefllError, match="PEFLL-D169"):
        mnist_writers.load(tmp_path)


def _text(length, seed):
    letters = np.array(list(shakespeare.VOCABULARY))
    return "".join(np.random.default_rng(seed).choice(letters, length))


def _write_roles(folder, roles):
    (folder / "shakespeare").mkdir(parents=True)
    lines = [json.dumps({"user": user, "play": "P", "text": text}) for user, text in roles.items()]
    (folder / "shakespeare/roles.jsonl").write_text("\n".join(lines) + "\n")


def _decode(tokens):
    return "".join(shakespeare.VOCABULARY[token] for token in tokens)


def test_shakespeare_windows_come_from_disjoint_stretches_in_order(tmp_path):
    assert len(set(shakespeare.VOCABULARY)) == len(shakespeare.VOCABULARY) == 80
    roles = {"A": _text(2000, 1), "SHORT": _text(700, 2), "B": _text(850, 3)}
    _write_roles(tmp_path, roles)
    samples = shakespeare.load(tmp_path)
    assert samples.client_names == ("A", "B")
    assert samples.tokens
    assert samples.normalise is None
    for client, name in enumerate(samples.client_names):
        text, ends = roles[name], []
        for split in (TRAIN, VALIDATION, TEST):
            mine = np.flatnonzero((samples.client == client) & (samples.split == split))
            starts = []
            for row in mine:
                window = _decode(samples.x[row]) + shakespeare.VOCABULARY[samples.y[row]]
                # Random texts of this length do not repeat, so that the place of a window is known.
                starts.append(text.index(window))
            if starts:
                assert starts == list(range(starts[0], starts[0] + len(starts)))
                ends.append((starts[0], starts[-1] + 81))
        for (_, stop), (start, _) in pairwise(ends):
            assert stop == start
        assert ends[0][0] == 0
        assert ends[-1] == (len(text) * 9 // 10, len(text))
        # B has no room for a validation window, and is a client all the same.
        assert len(ends) == (3 if name == "A" else 2)


def test_shakespeare_stride(tmp_path):
    _write_roles(tmp_path, {"A": _text(2000, 1)})
    dense, sparse = shakespeare.load(tmp_path), shakespeare.load(tmp_path, stride=7)
    for split in (TRAIN, VALIDATION, TEST):
        np.testing.assert_array_equal(dense.x[dense.split == split][::7], sparse.x[sparse.split == split])
        np.testing.assert_array_equal(dense.y[dense.split == split][::7], sparse.y[sparse.split == split])
    tenth = shakespeare.load_tenth(tmp_path)
    assert tenth.name == "shakespeare_tenth"
    np.testing.assert_array_equal(tenth.x, shakespeare.load(tmp_path, stride=10).x)
    with pytest.raises(PefllError, match="PEFLL-D198"):
        shakespeare.load(tmp_path, stride=0)


def test_shakespeare_unknown_characters():
    assert _decode(shakespeare.encode("Brontë’s\tÆ—猫{\ud800")) == "Bronte's  -   "


def test_shakespeare_leaf(tmp_path):
    text = _text(200, 5)
    windows = [text[i : i + 80] for i in range(100)], [text[i + 80] for i in range(100)]
    layouts.leaf_json(tmp_path / "shakespeare/train/a.json", {"A": windows})
    layouts.leaf_json(tmp_path / "shakespeare/test/a.json", {"A": (windows[0][:5], windows[1][:5])})
    # LEAF's own files go before roles.
    (tmp_path / "shakespeare/roles.jsonl").write_text("nonsense")
    samples = shakespeare.load(tmp_path)
    assert len(shakespeare.found(tmp_path)) == 2
    assert _decode(samples.x[3]) == text[3:83]
    assert samples.y[3] == shakespeare.VOCABULARY.index(text[83])
    assert samples.split.tolist() == [TRAIN] * 90 + [VALIDATION] * 10 + [TEST] * 5
    tenth = shakespeare.load_tenth(tmp_path)
    assert tenth.split.tolist() == [TRAIN] * 9 + [VALIDATION, TEST]
    assert _decode(tenth.x[3]) == text[30:110]


@pytest.mark.parametrize(
    ("users", "code"),
    [
        ({"A": (["short"], ["a"])}, "PEFLL-D203"),
        ({"A": (["a" * 80], ["ab"])}, "PEFLL-D204"),
        ({"A": ([3], ["a"])}, "PEFLL-D203"),
        ({}, "PEFLL-D205"),
    ],
)
def test_shakespeare_leaf_damaged(tmp_path, users, code):
    layouts.leaf_json(tmp_path / "shakespeare/train/a.json", users)
    with pytest.raises(PefllError, match=code):
        shakespeare.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"user": "A"', r"line 1\b.*PEFLL-D004"),
        (b'\n{"user": "A"}', r"line 2\b.*PEFLL-D202"),
        (b"[]", r"line 1\b.*PEFLL-D202"),
        (b"\xff\xfe", "PEFLL-D201"),
        (b'{"user": "A", "text": "few words"}', "PEFLL-D200"),
    ],
)
def test_shakespeare_damaged(tmp_path, content, sentence):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/roles.jsonl").write_bytes(content)
    with pytest.raises(PefllError, match=sentence):
        shakespeare.load(tmp_path)


def test_shakespeare_absent(tmp_path):
    assert shakespeare.found(tmp_path) == []
    with pytest.raises(PefllError, match="PEFLL-D199"):
        shakespeare.load(tmp_path)
