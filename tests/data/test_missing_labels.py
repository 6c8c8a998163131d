"""Tables in which some labels are missing: training refuses or drops such rows, and new clients need no labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.data import federation_from_frame, load_samples, read_client, read_each
from pefll.data.column_use import use_of
from pefll.data.missing_labels import has_label, labelled
from pefll.data.owners import Columns
from pefll.data.selecting import selected

ROWS = 24


def table(y, **columns):
    return {"n": np.arange(ROWS) % 5, "user": [f"u{row % 4}" for row in range(ROWS)], "y": y, **columns}


@pytest.mark.parametrize(
    ("y", "kept"),
    [
        (["a", None, "b"] * 8, 16),
        ([0, None, 1] * 8, 16),
        ([True, None, False] * 8, 16),
        (["a", "", "b"] * 8, 16),
        (np.array([True, False] * 12), 24),
    ],
)
def test_training_refuses_rows_without_a_label_or_leaves_them_out(y, kept):
    if kept < ROWS:
        with pytest.raises(PefllError, match=r"'y' has no label in 8 of 24.*row 2;.*'drop-unlabelled'.*D640"):
            federation_from_frame(table(y), "y", "user")
        gaps = [None, *range(1, ROWS)]  # the first row has a label, but no value
        with pytest.warns(UserWarning, match="8 rows of 24 without a label"):
            made = federation_from_frame(table(y, m=gaps), "y", "user", missing="drop-unlabelled")
        assert len(made.rows) == kept
        with pytest.warns(UserWarning, match="1 row of 16 with missing values left out"):
            assert len(federation_from_frame(table(y, m=gaps), "y", "user", missing="drop").rows) == kept - 1
    else:
        made = federation_from_frame(table(y), "y", "user")
    assert (len(made.rows), made.classes) == (kept, 2)
    assert made.y[0] == (y[0] not in ("a", 0))


def test_whole_numbers_with_gaps_are_classes_or_numbers_only_if_a_user_says_so():
    prices = [300.0, np.nan, 200.0] * 8
    with pytest.raises(PefllError, match=r"labels='classes', for numbers add labels='numbers' \[PEFLL-D113\]"):
        federation_from_frame(table(prices), "y", "user", missing="drop")
    with pytest.warns(UserWarning, match="8 rows of 24 without a label"):
        numbers = federation_from_frame(table(prices), "y", "user", missing="drop", labels="numbers")
    with pytest.warns(UserWarning, match="8 rows of 24 without a label"):
        classes = federation_from_frame(table([0.0, np.nan, 1.0] * 8), "y", "user", missing="drop", labels="classes")
    assert (numbers.labels, classes.classes, len(numbers.rows), len(classes.rows)) == ("numbers", 2, 16, 16)
    assert federation_from_frame(table([0.0, 1.0] * 12), "y", "user", labels="classes").classes == 2
    with pytest.raises(PefllError, match=r"label 1.5 of sample 2 .*PEFLL-D112"):  # as the table counts, with its gaps
        federation_from_frame(table([0.0, np.nan, 1.5] * 8), "y", "user", missing="drop", labels="classes")


def test_labels_of_several_columns_and_numbers():
    holes = [[1.5, None, 2.5] * 8, [0, None, 1] * 8]
    frame = table(holes[0]) | {"b": holes[1], "c": [None, 0, 1] * 8}
    drop: dict[str, Any] = {"features": ["n"], "missing": "drop"}
    for label, left, labels in (("y", 16, "auto"), (["b", "c"], 8, "sets")):
        with pytest.raises(PefllError, match="PEFLL-D640"):
            federation_from_frame(frame, label, "user")
        with pytest.warns(UserWarning, match="without a label"):
            assert len(federation_from_frame(frame, label, "user", labels=labels, **drop).rows) == left
    with pytest.raises(PefllError, match=r"for sets add labels='sets'.*PEFLL-D113"):  # the gaps made floats of them
        federation_from_frame(frame, ["b", "c"], "user", **drop)


def test_an_unseen_client_whose_rows_were_all_left_out():
    holes = table([None if row % 4 == 2 else "ab"[row % 3 > 0] for row in range(ROWS)])
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(PefllError, match=r"no client 'u2' among the rows that are left;.*PEFLL-D604"),
    ):
        federation_from_frame(holes, "y", "user", missing="drop", unseen_clients=["u2"])
    gaps = table(["a", "b"] * 12) | {"n": [np.nan if row % 4 == 2 else row % 5 for row in range(ROWS)]}
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(PefllError, match="no client 'u2' among the rows that are left;"),
    ):
        federation_from_frame(gaps, "y", "user", missing="drop", unseen_clients=["u2"])
    with pytest.raises(PefllError, match="no client 'u9';"):
        federation_from_frame(table(["a", "b"] * 12), "y", "user", unseen_clients=["u9"])


def test_a_column_without_any_label():
    for missing in ("impute", "drop"):
        with pytest.raises(PefllError, match="PEFLL-D641"):
            federation_from_frame(table([None] * ROWS), "y", "user", missing=missing)


def test_the_cache_knows_how_many_rows_were_left_out(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "users.csv"
    pandas.DataFrame(table(["a", None, "b"] * 8)).to_csv(path, index=False)
    for _ in range(2):
        samples = load_samples(path, tmp_path, label="y", client="user", use=use_of(missing="drop"))
        assert (len(samples.x), selected(samples, "drop")[1]) == (16, ["users: 8 rows of 24 without a label left out"])
    with pytest.raises(PefllError, match="PEFLL-D640"):
        load_samples(path, tmp_path, label="y", client="user")


def test_files_of_new_clients(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "one.csv"

    def read(y, **more):
        pandas.DataFrame({"n": range(len(y)), "y": y}).to_csv(path, index=False)
        return read_client(path, label="y", features=["n"], **more)

    assert read([None] * 4)[1] is None
    x, y = read(["b", None, "a"], class_names=("a", "b"), gaps=True)
    assert len(x) == 3
    np.testing.assert_array_equal(y, [1, np.nan, 0])
    np.testing.assert_array_equal(read([0.5, None, 2], labels="numbers", gaps=True)[1], [0.5, np.nan, 2])
    with pytest.raises(PefllError, match="PEFLL-D111"):
        read(["b", None, "a"], class_names=("a", "b"))  # a client that trains needs all labels
    pandas.DataFrame(table([None] * ROWS)).to_csv(path, index=False)
    assert all(one.y is None for one in read_each(path, Columns(["n"], "y", "user")))


def test_what_a_method_gets():
    x, y = np.arange(3.0)[:, None], np.array([1, np.nan, 0])
    assert has_label(y).tolist() == [True, False, True]
    kept, labels, left_out = labelled(x, y, needed=True)
    assert (kept[:, 0].tolist(), labels.tolist(), labels.dtype, left_out) == ([0, 2], [1, 0], np.int64, 1)
    kept, labels, left_out = labelled(x, y, needed=False)
    assert (len(kept), labels, left_out) == (3, None, 0)
    assert labelled(x, [None] * 3, needed=True)[1:] == (None, 0)
