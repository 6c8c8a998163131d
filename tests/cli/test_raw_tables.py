"""`pefll train` and `predict` with tables as they are."""

from __future__ import annotations

import csv
import re

import pyarrow
import pyarrow.parquet
import pytest

SMALL = ("--method", "local", "--rounds", 1, "--device", "cpu")


def test_train_prints_what_the_labels_are(pefll, tmp_path):
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["n", "user", "liked"])
        table.writerows(
            [row % 7, f"u{row % 10}", "[yse]" if row == 3 else ["no", "yes"][row % 2]] for row in range(1500)
        )
    columns = ("--label", "liked", "--client-column", "user")
    small = (
        "--method",
        "local",
        "--rounds",
        1,
        "--device",
        "cpu",
        "--data-dir",
        tmp_path / "d",
        "--out",
        tmp_path / "r",
    )
    said = pefll("train", "--data", path, *columns, *small)
    assert said.code == 0, said
    assert "label 'liked': [yse] <0.1%, no 50.0% and yes 49.9%\n" in said.out + said.err
    assert "class '[yse]' has 1 of 1,500 rows; is it a typing error?\n" in said.out + said.err


NESTED = {
    "list": pyarrow.array([["a", "b"]] * 60),
    "dictionary": pyarrow.array([{"a": 1, "b": [2.0]}] * 60),
    "map": pyarrow.array([[("k", 1)]] * 60, pyarrow.map_(pyarrow.string(), pyarrow.int8())),
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_columns_of_a_parquet_file_may_be_left_out(pefll, tmp_path, kind):
    path, mine, model = tmp_path / "t.parquet", tmp_path / "mine.parquet", tmp_path / "me.safetensors"
    table = pyarrow.table(
        {
            "tags": NESTED[kind],
            "n": [row % 7 for row in range(60)],
            "user": [f"u{row % 6}" for row in range(60)],
            "liked": [row % 2 for row in range(60)],
        }
    )
    pyarrow.parquet.write_table(table, path)
    pyarrow.parquet.write_table(table.filter(pyarrow.array([row % 6 == 0 for row in range(60)])), mine)
    columns = ("--label", "liked", "--client-column", "user", *SMALL, "--data-dir", tmp_path / "d")
    for wrong in (columns, (*columns, "--label", "tags", "--drop", "n"), (*columns, "--client-column", "tags")):
        said = pefll("train", "--data", path, *wrong)
        assert said.code == 2
        assert re.search(r"'tags' has values of type .*--drop 'tags' \[PEFLL-D160\]", said.err), said
    for name, chosen in {"dropped": ("--drop", "tags"), "named": ("--features", "n")}.items():
        said = pefll("train", "--data", path, *columns, *chosen, "--out", tmp_path / name)
        assert said.code == 0, said
    assert pefll("personalize", tmp_path / "named", "--data", mine, "--out", model).code == 0
    said = pefll("predict", model, "--data", mine)
    assert said.code == 0, said
