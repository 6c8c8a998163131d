"""Files that would become far larger than they are, or that are not what they say: bounded, and one sentence each."""

from __future__ import annotations

import io
import json
import struct
import time
import zipfile
import zlib

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from pefll.core.errors import PefllError
from pefll.data import leaf, limits, load_samples, npz, read_samples, shakespeare
from pefll.data.client_files import read_client
from pefll.data.column_plan import ColumnPlan
from pefll.data.frames import raw_columns
from pefll.data.table_files import read_frame
from pefll.data.table_plan import TablePlan
from pefll.data.table_samples import from_frame


def refused(path, code, read=read_samples, **more):
    with pytest.raises(PefllError) as error:
        read(path, **more)
    assert error.value.code == code
    assert "\n" not in str(error.value)
    return str(error.value)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def archive(path, method=zipfile.ZIP_DEFLATED, **members: bytes):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


@pytest.fixture
def bomb(tmp_path, monkeypatch):
    """An archive of some kilobytes that becomes 33 MB, where a sixteenth of the usual 268 MB is let be."""
    monkeypatch.setattr(limits, "ALWAYS", limits.ALWAYS // 16)
    rows = np.zeros(1 << 13, dtype=np.int64)
    return archive(tmp_path / "bomb.npz", x=header((1 << 13, 1 << 10)) + bytes(1 << 25), y=npy(rows), client=npy(rows))


def test_an_archive_that_becomes_a_thousand_times_as_large(bomb):
    for read in (read_samples, read_client, load_samples):
        assert "PEFLL_DATA_LIMIT_GB=1" in refused(bomb, "PEFLL-L002", read)


def test_a_user_may_raise_the_limit(bomb, monkeypatch):
    monkeypatch.setenv("PEFLL_DATA_LIMIT_GB", "0.03")
    refused(bomb, "PEFLL-L002")
    monkeypatch.setenv("PEFLL_DATA_LIMIT_GB", "1")
    assert read_samples(bomb).x.shape == (1 << 13, 1 << 10)
    monkeypatch.setattr("pefll.data.limits.available_memory", lambda: 20_000_000)
    refused(bomb, "PEFLL-L003")
    monkeypatch.setenv("PEFLL_DATA_LIMIT_GB", "much")
    refused(bomb, "PEFLL-L005")


def test_the_inputs_of_a_table_must_fit_into_memory(monkeypatch):
    """A category of one byte in a file becomes 32 inputs."""
    values = [f"v{number % 30}" for number in range(300)]
    plan = TablePlan((ColumnPlan("a", "category", values=tuple(sorted(set(values)))),))
    assert plan.encode({"a": np.array(values)}, "the table").shape == (300, 30)
    monkeypatch.setattr("pefll.data.limits.available_memory", lambda: 50_000)
    raw, x = raw_columns({"a": np.array(values)}, ["a"], {}, "mine")
    for make in (lambda: plan.encode({"a": np.array(values)}, "mine"), lambda: plan.inputs(raw, x)):
        with pytest.raises(PefllError, match=r"300 rows of 30 inputs.*72 kB of memory") as error:
            make()
        assert error.value.code == "PEFLL-L003"


def test_ordinary_archives_are_read(tmp_path):
    rng = np.random.default_rng(0)
    sparse = (rng.random((5000, 784)) > 0.99).astype(np.float32)  # compresses well, as pictures of digits do
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", x=sparse, y=np.arange(5000) % 3, client=np.arange(5000) % 7)
        assert np.array_equal(read_samples(tmp_path / "a.npz").x, sparse)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (header((1 << 60,)) + bytes(8), "PEFLL-D003"),
        (header((10**9, 10**9)) + bytes(8), "PEFLL-D003"),
        (header((2, 3)) + bytes(20), "PEFLL-D003"),
        (header((2, 3)) + bytes(28), "PEFLL-D003"),
        (header((-1, 3)) + bytes(24), "PEFLL-D175"),
        (header((2, 3), "|O") + bytes(24), "PEFLL-D174"),
        (b"\x93NUMPY\x01\x00\xff\xff{" + bytes(100), "PEFLL-D175"),
        (b"\x93NUMPY\x09\x00" + bytes(100), "PEFLL-D175"),
        (b"no array", "PEFLL-D175"),
        (b"", "PEFLL-D175"),
    ],
)
def test_headers_that_lie(tmp_path, content, code):
    path = archive(tmp_path / "a.npz", x=content, y=npy(np.zeros(2, dtype=np.int64)))
    refused(path, code)


@pytest.mark.parametrize("name", ["y", "client", "split"])
@pytest.mark.parametrize("descr", ["<U0", "|S0", "|V0"])
def test_entries_that_take_no_bytes_in_an_archive(tmp_path, monkeypatch, name, descr):
    monkeypatch.setattr("pefll.data.npz._read", None)  # nothing is read
    good = {"x": npy(np.zeros((3, 2), dtype=np.float32)), "y": npy(np.zeros(3, dtype=np.int64))}
    for many in (3, 10**8):
        path = archive(tmp_path / "a.npz", **(good | {name: header((many,), descr)}))
        refused(path, "PEFLL-D012", lambda path: npz.read_npz(path, ("x", "y"), ("client", "split")))


def test_lengths_and_texts_are_compared_and_counted_before_anything_is_read(tmp_path, monkeypatch):
    x, y = np.zeros((1 << 21, 1), dtype=np.uint8), np.zeros(1 << 21, dtype="S2")
    path = archive(tmp_path / "a.npz", x=npy(x), y=npy(y), client=npy(np.zeros(5, dtype=np.int64)))
    monkeypatch.setattr("pefll.data.npz._read", None)
    refused(path, "PEFLL-D135", lambda path: npz.read_npz(path, ("x", "client")))
    monkeypatch.setattr(limits, "ALWAYS", 64 << 21)  # 6 MB in arrays, but each text becomes a Python object
    refused(path, "PEFLL-L002", lambda path: npz.read_npz(path, ("x", "y")))


def test_members_that_numpy_does_not_write(tmp_path):
    good = {"x": npy(np.zeros((4, 2), dtype=np.float32)), "y": npy(np.zeros(4, dtype=np.int64))}
    refused(archive(tmp_path / "lzma.npz", zipfile.ZIP_LZMA, **good), "PEFLL-D002")
    refused(archive(tmp_path / "bz2.npz", zipfile.ZIP_BZIP2, **good), "PEFLL-D002")
    path = archive(tmp_path / "secret.npz", **good)
    content = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(signature)
        while at >= 0:
            content[at + flags] |= 1
            at = content.find(signature, at + 4)
    path.write_bytes(content)
    refused(path, "PEFLL-D001")
    # A member whose checksum is wrong.
    path = archive(tmp_path / "crc.npz", zipfile.ZIP_STORED, **good)
    content = path.read_bytes()
    place = content.find(bytes(32))
    path.write_bytes(content[:place] + b"\1" + content[place + 1 :])
    refused(path, "PEFLL-D175")


def png(width: int, height: int, rows: int) -> bytes:
    """A grey picture of one colour that has the first rows only."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(bytes(width + 1)) for _ in range(rows)) + packer.flush()
    about = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("side", [12_000, 60_000])
def test_a_picture_of_144_megapixels(tmp_path, side):
    folder = tmp_path / "ann" / "cat"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(png(side, side, 10))
    refused(tmp_path, "PEFLL-L004")


def test_many_pictures_that_become_large(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ALWAYS", limits.ALWAYS // 64)
    for number in range(10):
        folder = tmp_path / f"client{number}" / "cat"
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(png(1000, 500, 500))
    refused(tmp_path, "PEFLL-L002")


def test_a_parquet_file_of_a_million_equal_rows(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    monkeypatch.setattr(limits, "ALWAYS", limits.ALWAYS // 16)
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(1_000_000, np.int8)), pyarrow.array([0.0]))
    names = ["a", "b", "label", "client"]
    pyarrow.parquet.write_table(pyarrow.table([column] * 4, names), path)
    assert path.stat().st_size < 100_000
    refused(path, "PEFLL-L002")


def test_a_picture_of_another_size_is_not_decoded(tmp_path, monkeypatch):
    folder = tmp_path / "ann" / "cat"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(png(8, 8, 8))
    for number in range(2, 5):
        (folder / f"{number}.png").write_bytes(png(5000, 5000, 5000))
    monkeypatch.setattr("PIL.Image.Image.convert", None)
    refused(tmp_path, "PEFLL-D154")


def test_coloured_pictures_behind_a_grey_one_are_counted(tmp_path, monkeypatch):
    folder = tmp_path / "ann" / "cat"
    folder.mkdir(parents=True)
    for number, mode in enumerate(["L", "RGB", "RGB"]):
        Image.new(mode, (1000, 1000)).save(folder / f"{number}.png")
    monkeypatch.setattr(limits, "ALWAYS", 8_000_000)
    refused(tmp_path, "PEFLL-L002")
    monkeypatch.setattr(limits, "ALWAYS", 10_000_000)
    assert read_samples(tmp_path).x.shape == (3, 3, 1000, 1000)


WIDE = ",".join(f"a{number}" for number in range(5000))
QUOTED = ",".join(f'"a\n{number}"' for number in range(5000))


@pytest.mark.parametrize(
    "content",
    [
        f"{WIDE},label,client\n" + "1\n" * 5000,
        f"\n \n{WIDE},label,client\r" + "1\r" * 5000,
        f"\ufeff{QUOTED},label,client\n" + "1\n" * 5000,
        "a,label,client\n" + "1," * 5000 + "1\n" + "1\n" * 5000,
        ",".join("a" * 150_000) + "\n1\n",
    ],
    ids=["short lines", "other ends of lines", "quoted names", "a long first line", "many columns"],
)
def test_a_csv_whose_lines_are_filled_up(tmp_path, monkeypatch, content):
    monkeypatch.setattr("pandas.read_csv", None)  # nothing is parsed
    path = tmp_path / "a.csv"
    path.write_text(content, newline="")
    refused(path, "PEFLL-L002")


def test_an_ordinary_wide_csv_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{WIDE},label,client\n" + f"{'0,' * 5000}1,2\n" * 100)
    assert read_samples(path).x.shape == (100, 5000)


def test_a_parquet_file_of_one_long_text(tmp_path):
    path = tmp_path / "a.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(40_000, np.int8)), pyarrow.array(["x" * 10_000]))
    frame = {"text": text, "label": np.zeros(40_000), "client": np.zeros(40_000)}
    for kind in (text.type, pyarrow.string(), pyarrow.large_binary()):
        table = pyarrow.table(frame | {"text": text.cast(kind)})
        pyarrow.parquet.write_table(table, path)
        assert path.stat().st_size < 10_000
        before = pyarrow.total_allocated_bytes()
        refused(path, "PEFLL-L002")
        assert pyarrow.total_allocated_bytes() - before < 10_000_000
        del table


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.float32()), pyarrow.struct([("a", pyarrow.int8())])])
def test_a_parquet_file_of_lists_is_not_read(tmp_path, monkeypatch, kind):
    path = tmp_path / "a.parquet"
    inner = pyarrow.array([[1.0]] * 3 if pyarrow.types.is_list(kind) else [{"a": 1}] * 3, kind)
    pyarrow.parquet.write_table(pyarrow.table({"b": inner, "label": [0, 1, 2], "client": [0, 1, 2]}), path)
    read, asked = pyarrow.parquet.read_table, []
    monkeypatch.setattr("pyarrow.parquet.read_table", lambda *path, **more: asked.append(more) or read(*path, **more))
    refused(path, "PEFLL-D160")
    assert [each["columns"] for each in asked] == [["label", "client"]]


def test_columns_behind_nested_ones_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    inner = pyarrow.array([{"a": 1, "b": 2}] * 100_000)
    for size, code in ((pyarrow.int8(), None), (pyarrow.date32(), "PEFLL-L002")):
        table = {"inner": inner, "last": pyarrow.array([0] * 100_000, pyarrow.int32()).cast(size)}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        monkeypatch.setattr(limits, "ALWAYS", 4_000_000)
        if code:
            refused(path, code, read_frame)
        else:
            assert read_frame(path).shape == (100_000, 2)


def test_dates_of_a_parquet_file_are_counted_as_objects(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([0] * 100_000, pyarrow.date32())}), path)
    monkeypatch.setattr(limits, "ALWAYS", 4_000_000)
    refused(path, "PEFLL-L002", read_frame)


def test_json_that_is_nested_deeply(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text("[" * 200_000)
    refused(tmp_path, "PEFLL-D004", lambda path: list(leaf.users(path)))
    roles = tmp_path / "roles"
    (roles / "shakespeare").mkdir(parents=True)
    (roles / "shakespeare" / "roles.jsonl").write_text('{"a":' * 200_000)
    refused(roles, "PEFLL-D004", shakespeare.load)


@pytest.mark.parametrize("name", [3, None, ["a"], {}])
def test_users_of_leaf_with_odd_names(tmp_path, name):
    (tmp_path / "train").mkdir()
    content = {"users": [name], "num_samples": [1], "user_data": {"a": {"x": [1], "y": [1]}}}
    (tmp_path / "train" / "a.json").write_text(json.dumps(content))
    refused(tmp_path, "PEFLL-D167", lambda path: list(leaf.users(path)))


@pytest.mark.parametrize("label", [10**20, 10**400, -(10**30)])
def test_labels_that_no_array_holds(tmp_path, label):
    path = tmp_path / "a.csv"
    path.write_text(f"a,label,client\n1,0,1\n2,{label},1\n")
    refused(path, "PEFLL-D008")
    refused(path, "PEFLL-D008", read_client)


def test_a_label_of_five_thousand_digits(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"a,label,client\n1,0,1\n2,1{'0' * 5000},1\n")
    refused(path, "PEFLL-D009")


def test_columns_of_one_name(tmp_path):
    frame = pd.DataFrame(np.zeros((3, 3)), columns=["a", "a", "b"]).assign(label=0, client=0)
    refused(frame, "PEFLL-D006", lambda frame: from_frame(frame, "label", "client"))


def test_time_grows_with_columns_and_not_with_their_square():
    def seconds(columns: int) -> float:
        frame = {f"feature{number}": np.zeros(2) for number in range(columns)} | {"y": [0, 1], "c": [0, 1]}
        began = time.process_time()
        from_frame(frame, "y", "c")
        return time.process_time() - began

    seconds(100)
    few, many = (min(seconds(columns) for _ in range(3)) for columns in (1_000, 20_000))
    assert many < 100 * max(few, 1e-3)  # twenty times as many columns; the square would be 400 times as long
