import sys
import warnings

import numpy as np
import pandas
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.data import (
    TEST,
    TRAIN,
    VALIDATION,
    Samples,
    federation_from_arrays,
    federation_from_frame,
    from_frame,
    make_federation,
    read_client,
    read_samples,
    samples_from_arrays,
)
from pefll.data.column_use import Use

X = np.linspace(0, 1, 24).reshape(12, 2)
Y = np.arange(12) % 3
CLIENT = np.arange(12) // 3


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((12, 8, 8), (12, 1, 8, 8)),
        ((12, 8, 9, 3), (12, 3, 8, 9)),
        ((12, 8, 9, 1), (12, 1, 8, 9)),
        ((12, 3, 8, 9), (12, 3, 8, 9)),
        ((12, 1, 8, 3), (12, 1, 8, 3)),
        ((12, 5), (12, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_images_become_channels_first(shape, stored, dtype):
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    samples = samples_from_arrays(x, Y)
    assert samples.x.shape == stored
    assert samples.x.dtype == (np.uint8 if dtype is np.uint8 else np.float32)
    if shape == (12, 8, 9, 3):
        np.testing.assert_array_equal(samples.x[4, 2], x[4, :, :, 2].astype(samples.x.dtype))


def test_lists_and_tensors():
    samples = samples_from_arrays(X.tolist(), Y.tolist(), CLIENT.tolist())
    assert samples.x.dtype == np.float32
    assert samples.y.dtype == np.int64
    assert samples.classes == 3
    assert samples_from_arrays(torch.tensor(X), torch.tensor(Y)).y.tolist() == Y.tolist()
    assert samples_from_arrays(X, Y, classes=7).classes == 7


def test_tokens():
    assert samples_from_arrays(np.ones((12, 4), int), Y, tokens=True).x.dtype == np.int64
    assert samples_from_arrays(np.ones((12, 4, 2), np.uint8), Y, tokens=True).x.shape == (12, 4, 2)
    for bad, code in ((np.ones((12, 4)), "PEFLL-D106"), (-np.ones((12, 4), int), "PEFLL-D107")):
        with pytest.raises(PefllError, match=code):
            samples_from_arrays(bad, Y, tokens=True)


def test_texts_are_sorted_and_numbered():
    labels = np.array(["dog", "cat", "emu"] * 4)
    samples = samples_from_arrays(X, labels, ["zoe", "bob"] * 6)
    assert samples.class_names == ("cat", "dog", "emu")
    assert samples.y[:3].tolist() == [1, 0, 2]
    assert samples.client_names == ("bob", "zoe")
    assert samples.client[:2].tolist() == [1, 0]
    assert samples_from_arrays(X, labels.astype("S")).class_names == ("cat", "dog", "emu")
    # Numbers in texts keep the order of numbers.
    assert samples_from_arrays(X, ["10", "9", "8"] * 4).class_names == ("8", "9", "10")


@pytest.mark.parametrize("keys", [[0, 1, 2], [5, 900, 7], [-3, 10**12, 0], [2.0, 8.0, 4.0]])
def test_client_keys_are_numbered_without_gaps(keys):
    samples = samples_from_arrays(X, Y, client=keys * 4)
    assert samples.client[:3].tolist() == np.argsort(np.argsort(keys)).tolist()
    assert federation_from_arrays(X, Y, keys * 4).num_clients == 3


@pytest.mark.parametrize(
    "split", [[0, 0, 1, 2] * 3, ["train", "training", "val", "test"] * 3, ["Train", "TRAIN", "valid", "Test"] * 3]
)
def test_splits_in_words_and_numbers(split):
    assert samples_from_arrays(X, Y, split=split).split.tolist() == [TRAIN, TRAIN, VALIDATION, TEST] * 3


NAN = X.copy()
NAN[7, 1] = np.nan


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x": X[:5]}, r"\b5 samples.*\b12\b.*PEFLL-D135"),
        ({"x": X[:0], "y": Y[:0]}, "PEFLL-D134"),
        ({"x": [[1, 2], [3]]}, "PEFLL-D109"),
        ({"x": X > 0}, r"\bbool\b.*PEFLL-D103"),
        ({"x": X.astype(str)}, r"texts.*PEFLL-D103"),
        ({"x": X.astype(complex)}, r"complex.*PEFLL-D103"),
        ({"x": X[:, 0]}, "PEFLL-D104"),
        ({"x": X[:, :0]}, "PEFLL-D105"),
        ({"x": NAN}, r"sample 7\b.*PEFLL-D010"),
        ({"x": X * 1e300}, "PEFLL-D010"),
        ({"y": Y + 0.5, "labels": "classes"}, r"\b0\.5\b.*sample 0\b.*PEFLL-D112"),
        ({"y": np.where(Y == 1, np.nan, Y + 0.5)}, r"sample 1 .*\bnan\b.*PEFLL-D501"),
        ({"y": np.where(Y == 1, np.nan, Y)}, r"\bnan\b.*sample 1\b.*PEFLL-D112"),
        ({"y": Y.astype(float)}, r"\bfloat64\b.*y\.astype\(int\).*PEFLL-D113"),
        ({"y": Y.astype(np.float32).tolist()}, r"\bfloat64\b.*PEFLL-D113"),
        ({"y": torch.tensor(Y).float()}, r"\bfloat32\b.*PEFLL-D113"),
        ({"y": Y - 1}, r"label -1.*PEFLL-D138"),
        ({"feature_names": ["a"]}, r"\b1 feature name.*\b2\b.*PEFLL-D141"),
        ({"y": Y * 10**9}, r"2,000,000,000.*\b12 samples.*PEFLL-D101"),
        ({"y": np.array(["2024"] * 12, dtype="M8[Y]")}, r"\bdatetime64.*PEFLL-D114"),
        ({"y": X, "labels": "classes"}, "PEFLL-D110"),
        ({"y": np.zeros((12, 2, 2))}, "PEFLL-D504"),
        ({"y": np.array([["a", "b"]] * 12), "labels": "sets"}, "PEFLL-D504"),
        ({"y": np.arange(24).reshape(12, 2), "labels": "sets"}, "PEFLL-D505"),
        ({"y": X, "classes": 3}, "PEFLL-D503"),
        ({"y": Y, "labels": "colours"}, "colours.*PEFLL-A101"),
        ({"y": ["a", None, "b"] * 4}, "PEFLL-D111"),
        ({"y": [1, "b", 2] * 4}, "PEFLL-D111"),
        ({"classes": 2}, r"\b2 classes.*PEFLL-D139"),
        ({"classes": 0}, r"\bclasses\b.*\b0\b.*PEFLL-A002"),
        ({"classes": 2, "y": ["a", "b", "c"] * 4}, r"\b2\b.*\b3\b.*PEFLL-D102"),
        ({"client": CLIENT[:5]}, r"\bclient\b.*\b5\b.*PEFLL-D135"),
        ({"client": [None] * 12}, r"client.*PEFLL-D111"),
        ({"client": CLIENT + 0.5}, "PEFLL-D112"),
        ({"split": [3] * 12}, "PEFLL-D116"),
        ({"split": [-1] * 12}, "PEFLL-D116"),
        ({"split": ["trian"] * 12}, r"'trian'.*PEFLL-D115"),
        ({"split": [0] * 3}, r"\bsplit\b.*\b3\b.*PEFLL-D135"),
    ],
)
def test_bad_arrays_get_one_sentence(arguments, sentence):
    with pytest.raises(PefllError, match=sentence) as caught:
        samples_from_arrays(**({"x": X, "y": [*Y] if "y" not in arguments else None} | arguments))
    assert "\n" not in str(caught.value)


def test_a_federation_needs_clients():
    with pytest.raises(PefllError, match="PEFLL-D182"):
        federation_from_arrays(X, Y, None)


def _images(seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (400, 5, 5, 3), dtype=np.uint8), random.integers(0, 4, 400), np.arange(400) // 10


def test_normalise_is_that_of_seen_training_samples():
    x, y, client = _images()
    federation = federation_from_arrays(x, y, client, seed=3)
    rows = torch.cat([federation.indices(client) for client in range(federation.num_seen)])
    pixels = federation.x[rows].double() / 255
    np.testing.assert_allclose(federation.normalise.mean, pixels.mean(dim=(0, 2, 3)))
    np.testing.assert_allclose(federation.normalise.std, pixels.std(dim=(0, 2, 3), correction=0))
    ready = federation.prepare(federation.x[rows], torch.float64)
    assert ready.mean().item() == pytest.approx(0, abs=1e-9)


def test_tokens_stay_whole_numbers():
    x = np.arange(400 * 3).reshape(400, 3) % 50
    federation = federation_from_arrays(x, np.arange(400) % 2, np.arange(400) // 10, tokens=True)
    assert (federation.tokens, federation.x.dtype, federation.normalise) == (True, torch.int64, None)
    assert sorted(federation.x.flatten().tolist()) == sorted(x.flatten().tolist())
    with pytest.raises(PefllError, match="PEFLL-D106"):
        federation_from_arrays(x / 2, np.arange(400) % 2, np.arange(400) // 10, tokens=True)


def test_poisoned_unseen_and_held_out_samples_change_nothing_in_training():
    x, y, client = _images()
    clean = federation_from_arrays(x, y, client, seed=3, classes=4)
    trained = torch.cat([clean.indices(client) for client in range(clean.num_seen)])
    poisoned_x, poisoned_y = np.full_like(x, 255), 3 - y
    poisoned_x[trained], poisoned_y[trained] = x[trained], y[trained]
    poisoned = federation_from_arrays(poisoned_x, poisoned_y, client, seed=3, classes=4)
    assert poisoned.normalise == clean.normalise
    assert torch.equal(poisoned.rows, clean.rows)
    assert not torch.equal(poisoned.x, clean.x)
    moved = poisoned_x.copy()
    moved[trained[0]] = 255 - x[trained[0]]
    assert federation_from_arrays(moved, y, client, seed=3).normalise != clean.normalise


def test_normalise_of_images_dealt_by_class_and_of_one_value():
    x, y, _ = _images()
    federation = make_federation(samples_from_arrays(x, y), partition="by-class 2", clients=8, seed=0)
    assert len(federation.normalise.mean) == 3
    flat = federation_from_arrays(np.full((12, 4, 4), 51, np.uint8), Y, CLIENT)
    assert flat.normalise.mean == pytest.approx((0.2,))
    assert flat.normalise.std == (1.0,)
    assert federation_from_arrays(X, Y, CLIENT).normalise is None


def test_npz(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=X, y=Y, client=CLIENT, split=np.array([0, 0, 2] * 4), other=3)
    samples = read_samples(path)
    assert samples.name == "mine"
    assert samples.client.tolist() == CLIENT.tolist()
    assert samples.split.tolist() == [0, 0, 2] * 4
    np.savez_compressed(path, x=X, y=Y)
    assert read_samples(path).client is None
    x, y = read_client(path)
    np.testing.assert_allclose(x, X.astype(np.float32))
    assert y.tolist() == Y.tolist()
    np.savez(path, x=X)
    assert read_client(path)[1] is None


def test_npz_damaged(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=X)
    with pytest.raises(PefllError, match=r"\by\b.*\bx\b.*PEFLL-D173"):
        read_samples(path)
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    for content in (b"", whole[:10], whole[:-30], b"not a zip", whole[:100] + bytes(60) + whole[160:]):
        path.write_bytes(content)
        with pytest.raises(PefllError, match="PEFLL-D175"):
            read_samples(path)
    np.savez(path, x=np.array([{}] * 12), y=Y)
    with pytest.raises(PefllError, match="PEFLL-D174"):
        read_samples(path)
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(PefllError, match="PEFLL-D175"):
        read_samples(path)


def _frame():
    return pandas.DataFrame({"a": X[:, 0], "client": [f"c{i}" for i in CLIENT], "b": X[:, 1], "label": Y})


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_tables(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    frame = _frame()
    if suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    samples = read_samples(path)
    np.testing.assert_allclose(samples.x, X, atol=1e-7)
    assert samples.y.tolist() == Y.tolist()
    assert samples.client_names == ("c0", "c1", "c2", "c3")
    assert read_samples(path, client="label", label="client").class_names == ("c0", "c1", "c2", "c3")
    with pytest.raises(PefllError, match=r"column 'clint'.*a, client, b, label.*PEFLL-D177"):
        read_samples(path, client="clint")


def test_frames_of_many_kinds():
    import pyarrow

    frame = _frame()
    for each in (frame, pyarrow.Table.from_pandas(frame), {name: list(frame[name]) for name in frame}):
        samples = from_frame(each, label="label", client="client", features=["b"])
        np.testing.assert_allclose(samples.x[:, 0], X[:, 1], atol=1e-7)
    federation = federation_from_frame(frame, label="label", client="client", unseen=0.25)
    assert (federation.num_clients, federation.num_unseen, federation.input_shape) == (4, 1, (2,))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"label": "lable"}, r"column 'lable'.*a, client, b, label.*PEFLL-M054"),
        ({"client": None, "use": Use(encode="none")}, r"column 'client'.*PEFLL-D160"),
        ({"features": ["c"]}, r"column 'c'.*PEFLL-M054"),
        ({"features": []}, "PEFLL-D158"),
        ({"frame": X}, r"ndarray.*PEFLL-A020"),
    ],
)
def test_bad_frames(arguments, sentence):
    with pytest.raises(PefllError, match=sentence):
        from_frame(**({"frame": _frame(), "label": "label", "client": "client"} | arguments))


@pytest.mark.parametrize(
    ("suffix", "content"), [(".csv", b""), (".parquet", b"PAR1"), (".csv", b'a,b\n"1'), (".csv", b"\xff\xfe\x00")]
)
def test_damaged_tables(tmp_path, suffix, content):
    path = tmp_path / f"table{suffix}"
    path.write_bytes(content)
    with pytest.raises(PefllError, match="PEFLL-D597" if content[:1] == b"\xff" else "PEFLL-D163") as caught:
        read_samples(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["{a},{c},{b},{y},", "{c},{a},{c},{b},{y}", "{row},{a},{c},{b},{y},", "{row},{c},{b},{y},"]
)
def test_lines_that_are_longer_than_the_header_of_a_csv_shift_no_columns(tmp_path, line):
    """pandas takes the first cells as an index. Then clients are labels, and labels are features."""
    frame, path = _frame(), tmp_path / "table.csv"
    rows = zip(frame.a, frame.client, frame.b, frame.label, strict=True)
    lines = [line.format(row=row, a=a, c=c, b=b, y=y) for row, (a, c, b, y) in enumerate(rows)]
    path.write_text("\n".join([",".join(frame), *lines]))
    with pytest.raises(PefllError, match=r"names 4 columns.*have [56] cells.*PEFLL-D674"):
        read_samples(path)


def test_row_numbers_that_pandas_wrote_are_no_feature(tmp_path):
    """They are in the order of clients, so a model would learn who is who."""
    path = tmp_path / "table.csv"
    _frame().to_csv(path)
    assert read_samples(path).feature_names == ("a", "b")
    _frame()[::2].to_csv(path)
    assert read_samples(path).feature_names == ("a", "b")
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header.lstrip(","), *lines]))  # as R writes them
    assert read_samples(path).feature_names == ("a", "b")
    np.testing.assert_array_equal(read_samples(path).y, Y[::2])
    _frame().assign(**{"Unnamed: 0": X[:, 0]})[["Unnamed: 0", "client", "label"]].to_csv(path, index=False)
    assert read_samples(path).feature_names == ("Unnamed: 0",)


@pytest.mark.parametrize("order", ["shuffled", "repeated", "twice"])
def test_row_numbers_in_any_order_are_no_feature(tmp_path, order):
    """Rows of one client alone have sorted numbers: then a model of all clients would miss its column."""
    path = tmp_path / "table.csv"
    frame = _frame().sample(frac=1, random_state=0)
    if order == "repeated":
        frame = pandas.concat([rows.reset_index(drop=True) for _, rows in frame.groupby("client")])
    frame.to_csv(path)
    if order == "twice":
        pandas.read_csv(path).to_csv(path)
    assert read_samples(path).feature_names == ("a", "b")
    read = pandas.read_csv(path)
    assert read.columns[0].startswith("Unnamed: 0")
    assert from_frame(read, "label", "client").feature_names == ("a", "b")
    asked = from_frame(read, "label", "client", features=["Unnamed: 0", "a"])
    assert asked.feature_names == ("Unnamed: 0", "a"), "a user may ask for it"


@pytest.mark.parametrize(
    ("module", "file", "sentence"),
    [
        ("pandas", "t.csv", r"CSV.*\bpandas\b.*PEFLL-D162"),
        ("pandas", "t.parquet", r"Parquet.*\bpandas\b.*\bpyarrow\b.*PEFLL-D162"),
        ("pyarrow", "t.parquet", r"Parquet.*\bpandas\b.*\bpyarrow\b.*PEFLL-D162"),
    ],
)
def test_missing_extras(tmp_path, monkeypatch, module, file, sentence):
    (tmp_path / file).write_bytes(b"a,label\n1,2\n")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PefllError, match=sentence):
        read_samples(tmp_path / file)


def test_labels_of_an_npz_by_another_name(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((3, 2)), species=np.array([0, 1, 1]), y=np.array([0, 0, 0]))
    assert read_samples(path, label="species").y.tolist() == [0, 1, 1]
    assert read_samples(path).y.tolist() == [0, 0, 0]
    assert read_client(path, label="species")[1].tolist() == [0, 1, 1]
    assert read_client(path)[1].tolist() == [0, 0, 0]
    for read in (read_samples, read_client):
        with pytest.raises(PefllError, match=r"\bkind\b.*species, x, y.*PEFLL-D173"):
            read(path, label="kind")
    np.savez(path, x=np.zeros((3, 2)), label=np.array([1, 0, 1]))  # as a table's column is called
    assert read_samples(path).y.tolist() == [1, 0, 1]
    assert read_client(path, label="label")[1].tolist() == [1, 0, 1]


def test_client_tables(tmp_path):
    path = tmp_path / "client.csv"
    path.write_text("a,label,b\n1,dog,2\n3,cat,4\n")
    x, y = read_client(path, class_names=("cat", "dog"))
    assert x.tolist() == [[1, 2], [3, 4]]
    assert y.tolist() == [1, 0]
    path.write_text("a,b\n1,2\n")
    assert read_client(path)[1] is None
    path.write_text("a,b,label\n1,2,-1\n")
    with pytest.raises(PefllError, match=r"label -1.*PEFLL-D138"):
        read_client(path)
    path.write_text("a,b\n1,\n")
    with pytest.raises(PefllError, match="PEFLL-D010"):
        read_client(path)


def test_float_labels_of_a_client_are_refused(tmp_path):
    np.savez(tmp_path / "one.npz", x=X, y=Y.astype(float))
    with pytest.raises(PefllError, match="PEFLL-D113"):
        read_client(tmp_path / "one.npz")
    with pytest.raises(PefllError, match="PEFLL-D136"):
        Samples(X, Y.astype(float), 3)


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_tokens_of_a_client_stay_whole_numbers(tmp_path, suffix):
    path = tmp_path / f"one{suffix}"
    x = np.array([[1, 2, 2**24 + 1], [4, 5, 6]])
    if suffix == ".npz":
        np.savez(path, x=x, y=[0, 1])
    else:
        pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": [0, 1]}).to_csv(path, index=False)
    tokens, labels = read_client(path, tokens=True)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == x.tolist()
    assert labels.tolist() == [0, 1]
    assert read_client(path)[0].dtype == np.float32


def test_tokens_of_a_client_that_are_none(tmp_path):
    np.savez(tmp_path / "one.npz", x=X)
    (tmp_path / "one.csv").write_text("a,b\n1,2\n3,4.5\n")
    for file, code in (("one.npz", "PEFLL-D106"), ("one.csv", "PEFLL-D161")):
        with pytest.raises(PefllError, match=rf"{file}.*{code}"):
            read_client(tmp_path / file, tokens=True)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_client_table_like_the_training_table(tmp_path, suffix):
    path = tmp_path / f"table{suffix}"
    frame = _frame()
    frame["split"] = ["train", "train", "test"] * 4
    frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(path, index=False)
    x, y = read_client(path)
    np.testing.assert_array_equal(x, read_samples(path).x.astype(np.float32))
    assert y.tolist() == Y.tolist()
    frame = frame.rename(columns={"client": "who", "split": "when"})
    frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(path, index=False)
    np.testing.assert_array_equal(read_client(path, client="who", split="when")[0], x)


def test_a_client_table_has_the_columns_of_the_run(tmp_path):
    path = tmp_path / "table.csv"
    _frame().to_csv(path, index=False)
    federation = make_federation(read_samples(path), partition="natural", clients=None, seed=0)
    assert federation.feature_names == ("a", "b")
    path.write_text("note,b,id,a,label\nx,2,7,1,0\ny,4,8,3,2\n")
    x, _ = read_client(path, features=federation.feature_names)
    assert x.tolist() == [[1, 2], [3, 4]]
    path.write_text("b,label\n2,0\n")
    with pytest.raises(PefllError, match=r"'a'.*PEFLL-M030"):
        read_client(path, features=federation.feature_names)


def test_feature_names():
    assert from_frame(_frame(), label="label", client="client").feature_names == ("a", "b")
    assert from_frame(_frame(), label="label", client="client", features=["b"]).feature_names == ("b",)
    federation = federation_from_frame(_frame(), label="label", client="client")
    assert federation.feature_names == federation.to("cpu").feature_names == ("a", "b")
    assert federation_from_arrays(X, Y, CLIENT).feature_names == ()
    assert samples_from_arrays(X, Y, feature_names=["u", "v"]).feature_names == ("u", "v")


def test_paths_as_texts(tmp_path, monkeypatch):
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    assert len(read_samples(str(tmp_path / "mine.npz")).x) == 12
    assert len(read_client(str(tmp_path / "mine.npz"))[0]) == 12
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_samples("~/mine.npz").x) == 12
    assert len(read_client("~/mine.npz")[0]) == 12


def test_unknown_files(tmp_path):
    with pytest.raises(PefllError, match="PEFLL-D178"):
        read_samples(tmp_path / "absent.npz")
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(PefllError, match="PEFLL-D184"):
        read_client(tmp_path / "a.xyz")


def test_read_only_arrays_are_used_as_they_are():
    x = np.random.default_rng(0).random((12, 2), dtype=np.float32)
    y = Y.astype(np.int64)
    x.flags.writeable = y.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation = federation_from_arrays(x, y, CLIENT)
    assert federation.x.data_ptr() == x.ctypes.data


def test_a_file_of_several_clients_is_not_one_clients(tmp_path):
    path = tmp_path / "many.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.zeros(4, dtype=int), client=np.array([0, 0, 1, 2]))
    with pytest.raises(PefllError, match=r"\b3 clients.*PEFLL-M034"):
        read_client(path, alone=True)
    np.savez(path, x=np.zeros((4, 2)), y=np.zeros(4, dtype=int), client=np.array([7, 7, 7, 7]))
    assert read_client(path, alone=True)[0].shape == (4, 2)
    table = tmp_path / "many.csv"
    table.write_text("a,label,client\n1,0,x\n2,1,y\n")
    with pytest.raises(PefllError, match=r"\b2 clients.*PEFLL-M034"):
        read_client(table, alone=True)
    assert read_client(table)[0].tolist() == [[1], [2]]
