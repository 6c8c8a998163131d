"""What is said about the labels of a table."""

from __future__ import annotations

import numpy as np
import pytest

import pefll
from pefll.data import federation_from_frame
from pefll.data.label_report import label_sentence, rare_classes

ROWS = 2_000


def made(y, rows=ROWS, label="y", **more):
    columns = {"n": np.arange(rows) % 7, "user": [f"u{row % 20}" for row in range(rows)]}
    frame = columns | ({"y": list(y)} if label == "y" else y)
    return federation_from_frame(frame, label, "user", unseen=0.2, min_samples=1, **more)


def words(rows=ROWS, **odd):
    """Half no, half yes, and some other texts instead of the first ones."""
    found = ["no", "yes"] * (rows // 2)
    for place, word in enumerate(word for word, number in odd.items() for _ in range(number)):
        found[place] = word
    return found


def test_shares_of_classes_and_a_typing_error():
    plain, typo = made(words()), made(words(yse=1))
    assert label_sentence(plain) == "label 'y': no 50.0% and yes 50.0%"
    assert rare_classes(plain) == []
    assert label_sentence(typo) == "label 'y': no 50.0%, yes 50.0% and yse <0.1%"
    assert rare_classes(typo) == ["class 'yse' has 1 of 2,000 rows; is it a typing error?"]


@pytest.mark.parametrize(
    ("y", "rows"),
    [
        (words(yse=2), ROWS),  # 0.1% of the rows
        (words(900, yse=1), 900),  # few rows
        (words(8_000, yse=6), 8_000),  # 6 rows
        ([*(f"c{row % 20:02}" for row in range(ROWS - 1)), "odd"], ROWS),  # 21 classes
    ],
)
def test_other_rare_classes_get_no_note(y, rows):
    assert rare_classes(made(y, rows)) == []


def test_many_classes_and_long_names_are_cut():
    sentence = label_sentence(made([f"c{row % 20:02}" for row in range(ROWS)]))
    assert sentence.startswith("label 'y': c00 5.0%, c01 5.0%, ")
    assert sentence.endswith("c07 5.0% and 12 more")
    assert "x" * 41 not in label_sentence(made(["x" * 900, "y\nz"] * (ROWS // 2)))


def test_numbers_and_sets():
    values = np.linspace(0.5, 2.5, ROWS)
    assert label_sentence(made(values)) == "label 'y': 0.5 to 2.5 (mean 1.5)"
    two = {"a": values, "b": 10 * values}
    expected = "label 'a,b': a 0.5 to 2.5 (mean 1.5) and b 5 to 25 (mean 15)"
    assert label_sentence(made(two, label="a,b")) == expected
    sets = {"a": np.arange(ROWS) % 4 == 0, "b": np.arange(ROWS) % 2 == 0}
    assert label_sentence(made(sets, label="a,b")) == "label 'a,b': a 25.0% and b 50.0%"
    assert rare_classes(made(values)) == []


def test_a_report_of_the_columns_has_the_labels():
    *columns, last = pefll.data.columns_report(made(words()))
    assert [each["column"] for each in columns] == ["n"]
    assert (last["column"], last["kind"], last["done"]) == ("y", "label", "no 50.0% and yes 50.0%")


def test_training_asks_about_a_typing_error_once():
    with pytest.warns(UserWarning, match=r"'yse' has 1 of 2,000 rows") as warned:
        pefll.fit(made(words(yse=1)), method="local", rounds=1, device="cpu")
    assert sum("yse" in str(each.message) for each in warned) == 1
