"""`pefll data ...`, and data that is missing, damaged, wrong or has changed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pefll import data as sources
from pefll.runs.record import RunFolder
from tests.cli.conftest import SMALL, features, npz
from tests.data import layouts


def test_data_verbs(pefll, tmp_path):
    listed = pefll("data", "list", "--data-dir", tmp_path).out
    assert "built in" in listed
    assert "cifar100" in listed
    assert "comes with the package" in pefll("data", "get", "digits", "--data-dir", tmp_path).out
    layouts.femnist(tmp_path)
    said = pefll("data", "check", tmp_path)
    assert said.code == 0
    assert "missing" in said.out
    said = pefll("data", "summary", "digits", "--clients", 6, "--picture", tmp_path / "p.png")
    assert said.code == 0
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_folders_without_any_known_data_set(refused, pefll, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    said = refused("data", "check", tmp_path)
    assert "PEFLL-C003" in said
    assert f"`pefll data get cifar10 --data-dir {tmp_path}`" in said
    (tmp_path / "cifar-10-python.tar.gz.part").write_bytes(b"half")
    said = pefll("data", "check", tmp_path)
    assert said.code == 2
    assert "is not complete" in " ".join(said.out.replace("│", "").split()), "half a download is something"


def test_a_download_has_a_bar(pefll, tmp_path, monkeypatch):
    def get(name, data_dir, report):
        for done in (0, 50, 100):
            report(done, 100)
        return data_dir / name

    monkeypatch.setattr(sources, "get", get)
    said = pefll("data", "get", "cifar10", "--data-dir", tmp_path)
    assert said.code == 0
    assert "100/100 bytes" in said.err
    assert f"{tmp_path / 'cifar10'} is here" in said.out


@pytest.mark.parametrize("state", ["missing", "empty", "half", "wrong md5", "archive cut"])
def test_data_folders_that_are_wrong(refused, pefll, tmp_path, state):
    folder = tmp_path / "data"
    part = "PEFLL-D120"
    if state != "missing":
        folder.mkdir()
    if state in ("half", "wrong md5"):
        layouts.cifar10(folder, each=3)
        part = "PEFLL-D119"
    if state == "half":
        (folder / "cifar-10-batches-py" / "data_batch_4").unlink()
        part = r"\bdata_batch_4\b.*`pefll data get cifar10`.*PEFLL-D118"
    if state == "archive cut":
        (folder / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b\x08\x00half of an archive")
        part = "PEFLL-D122"
    arguments = ("train", "--data", "cifar10", "--data-dir", folder, *SMALL, "--out", tmp_path / "r")
    said = pefll(*arguments)
    assert said.code == 2
    *notes, error = said.err.splitlines()
    assert error.startswith("error: ")
    assert re.search(part, error)
    assert all("reading" in note or "cifar10" in note for note in notes)
    assert not (tmp_path / "r").exists()
    if state in ("half", "wrong md5", "archive cut"):
        said = pefll("data", "check", folder)
        assert said.code == 2
        assert "damaged" in said.out


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"y": np.zeros(95, dtype=np.int64)}, r"\b96 samples.*\by\b.*\b95\b.*PEFLL-D135"),
        ({"client": np.zeros(90, dtype=np.int64)}, r"\bclient\b.*\b90\b.*PEFLL-D135"),
        ({"y": np.full(96, -1)}, r"label -1.*PEFLL-D138"),
        ({"y": np.where(np.arange(96) == 5, np.nan, 0.5)}, r"sample 5\b.*nan.*PEFLL-D501"),
        ({"y": np.full(96, 2.0)}, r"--task regression.*PEFLL-D113"),
        ({"y": np.full(96, np.nan)}, "PEFLL-D112"),
        ({"y": np.r_[np.zeros(95, dtype=np.int64), 10**6]}, r"label 1,000,000 .*\b96 samples.*PEFLL-D101"),
        ({"y": np.full((96, 2), 3)}, "PEFLL-D110"),
        ({"x": np.where(np.arange(96 * 6).reshape(96, 6) == 77, np.nan, 1.0)}, "PEFLL-D010"),
        ({"x": np.full((96, 6), np.inf)}, "PEFLL-D010"),
        ({"x": np.array([["a"] * 6] * 96)}, "PEFLL-D103"),
        ({"x": np.zeros(96)}, "PEFLL-D104"),
        ({"x": np.zeros((0, 6)), "y": np.zeros(0, dtype=int), "client": np.zeros(0, dtype=int)}, "PEFLL-D134"),
        ({"split": np.repeat([0, 0, 0, 2, 0, 0, 0, 0], 12)}, "PEFLL-D195"),
        ({"split": np.full(96, 7)}, "PEFLL-D116"),
    ],
)
def test_ones_own_data_that_is_wrong(refused, tmp_path, changed, part):
    path = features(tmp_path / "mine.npz", **changed)
    refused("train", "--data", path, *SMALL[2:], "--out", tmp_path / "r", match=part)


def test_files_that_are_wrong(refused, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "a.txt").write_text("1 2 3")
    npz(tmp_path / "b.npz", x=np.zeros((3, 2)))
    npz(tmp_path / "c.npz", x=np.zeros((9, 2)), y=np.zeros(9, dtype=int))
    for name, part in (
        ("a.npz", "PEFLL-D175"),
        ("a.txt", "PEFLL-D184"),
        ("b.npz", r"np\.savez\(path, x=\.\.\., y=\.\.\.\).*PEFLL-D173"),
        ("c.npz", r"--partition .*PEFLL-T119"),
    ):
        refused("train", "--data", tmp_path / name, *SMALL[2:], "--out", tmp_path / "r", match=part)


def test_data_that_is_gone_or_has_changed(pefll, refused, tmp_path):
    path = features(tmp_path / "mine.npz")
    assert pefll("train", "--data", path, *SMALL[2:], "--out", tmp_path / "run").code == 0
    features(path, y=np.arange(96) % 3)
    refused("evaluate", tmp_path / "run", match=rf"{path}\b.*PEFLL-T120")
    path.unlink()
    refused("evaluate", tmp_path / "run", match=rf"{path}\b.*PEFLL-T118")


def table(arrays: Path, path: Path, **named: str) -> Path:
    """The same samples as a table; columns can be given other names."""
    with np.load(arrays) as content:
        names = [*"abcdef", named.get("label", "label"), named.get("client", "client")]
        columns = [*content["x"].T, content["y"], content["client"]]
    rows = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
    path.write_text("\n".join([",".join(names), *rows]))
    return path


def test_a_table_without_rows(pefll, tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "bare.csv").write_text("a,b,label,client\n")
    said = pefll("data", "summary", tmp_path / "bare.csv", "--data-dir", tmp_path)
    assert said.code == 2
    assert said.err.endswith(" [PEFLL-D159]\n")


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_labels_with_gaps_are_taken_with_a_note(pefll, tmp_path, kind):
    path = features(tmp_path / "mine.npz", y=np.array([0, 3, 7] * 32))
    if kind == "csv":
        pytest.importorskip("pandas")
        path = table(path, tmp_path / "mine.csv")
    note = "mine: the largest label is 7, so there are 8 classes, but 1, 2, 4, 5 and 6 have no sample\n"
    said = pefll("data", "summary", path, "--data-dir", tmp_path)
    assert said.code == 0
    assert said.err.count(note) == 1
    assert "no sample" not in said.out
    run = tmp_path / "run"
    said = pefll("train", "--data", path, "--data-dir", tmp_path, *SMALL[2:], "--out", run)
    assert said.code == 0
    assert said.err.count(note) == 1
    assert "no sample" not in pefll("evaluate", run).err, "once is enough"
    said = pefll("train", "--data", features(tmp_path / "full.npz"), *SMALL[2:], "--out", tmp_path / "other")
    assert said.code == 0
    assert "no sample" not in said.err


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_client_columns_of_other_names(pefll, tmp_path, kind):
    path = features(tmp_path / "mine.npz")
    if kind == "csv":
        pytest.importorskip("pandas")
        path = table(path, tmp_path / "mine.csv", client="writer")
    else:
        with np.load(path) as arrays:
            npz(path, x=arrays["x"], y=arrays["y"], writer=arrays["client"])
    # With a partition the clients would not be missed, and in a table they would be taken for a feature.
    asked = ("train", "--data", path, "--data-dir", tmp_path, *SMALL, "--partition", "dirichlet 5")
    said = pefll(*asked, "--client-column", "writr", "--out", tmp_path / "r")
    assert said.code == 2
    sentence = said.err.splitlines()[-1]
    if kind == "csv":
        assert sentence.startswith("error: mine.csv: ")
        assert re.search(r"'writr'.* a, b, c, d, e, f, label, writer\b.*--client-column \[PEFLL-D177\]$", sentence)
    else:
        assert re.search(rf"^error: {path} .*\bwritr\b.* writer, x, y\b.*PEFLL-D173", sentence)
    assert not (tmp_path / "r").exists()
    asked = ("train", "--data", path, "--data-dir", tmp_path, *SMALL[2:], "--client-column", "writer")
    assert pefll(*asked, "--out", tmp_path / "r").code == 0
    assert RunFolder(tmp_path / "r").summary()["num_clients"] == 8


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_summary_of_columns_of_other_names(pefll, tmp_path, kind):
    path = features(tmp_path / "mine.npz")
    if kind == "csv":
        pytest.importorskip("pandas")
        path = table(path, tmp_path / "mine.csv", label="species", client="writer")
    else:
        with np.load(path) as arrays:
            npz(path, x=arrays["x"], species=arrays["y"], writer=arrays["client"])
    columns = ("--label", "species", "--client-column", "writer")
    said = pefll("data", "summary", path, "--data-dir", tmp_path, *columns)
    assert said.code == 0, said.err
    assert "8 clients: 7 seen, 1 unseen; 3 classes" in said.out
    grid = ("--grid", "client_lr=0.01", "--out", tmp_path / "runs", "--to", tmp_path / "trials", "--rounds", 1)
    said = pefll("tune", "--data", path, "--data-dir", tmp_path, *columns, *grid, "--processes", 1)
    assert said.code == 0, said.err
    assert pefll("data", "summary", "digits", *columns).code == 2
