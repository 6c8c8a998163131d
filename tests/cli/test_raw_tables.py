"""`pefll train` and `predict` with tables as they are."""

from __future__ import annotations

import csv


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
