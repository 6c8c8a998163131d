"""Labels of a shape or a type that does not fit: the sentence says what to do, and doing so works."""

from __future__ import annotations

import re
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pefll
from pefll.core.errors import PefllError
from pefll.core.wording import for_the_command_line
from pefll.data.arrays import labels_of
from pefll.data.user_arrays import federation_from_arrays

N = 24
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
CLIENT = np.arange(N) % 4
HOT = np.eye(3, dtype=int)[np.arange(N) % 3]
WHOLE = np.arange(N) % 3
REAL = np.linspace(0.1, 9.7, N)
TEXTS = np.array(["a", "b", "c"])[WHOLE]
AS_CLASSES, AS_NUMBERS, AS_SETS = r"labels='classes'", r"labels='numbers'", r"labels='sets'"

# labels, what they were said to be, the code, what the sentence advises
WRONG: list[tuple[str, Any, str, str, list[str]]] = [
    ("bool column", WHOLE[:, None] > 0, "classes", "D110", [r"y\[:, 0\]", AS_SETS]),
    ("whole column", WHOLE[:, None], "auto", "D110", [r"y\[:, 0\]", AS_NUMBERS]),
    ("whole matrix", np.stack([WHOLE, WHOLE + 1], 1), "auto", "D110", [AS_NUMBERS]),
    ("one-hot as classes", HOT, "classes", "D110", [r"y\.argmax\(axis=1\)", AS_SETS]),
    ("one-hot floats", HOT.astype(float), "auto", "D113", [r"y\.argmax\(axis=1\)", AS_NUMBERS, AS_SETS]),
    ("float column", WHOLE[:, None].astype(float), "auto", "D113", [r"y\[:, 0\]\.astype\(int\)", AS_NUMBERS]),
    ("whole as sets", WHOLE, "sets", "D505", [r"there is 2\b", AS_CLASSES, AS_NUMBERS]),
    ("texts as numbers", TEXTS, "numbers", "D504", [AS_CLASSES]),
    ("texts of a frame", TEXTS.astype(object), "numbers", "D504", ["labels are texts", AS_CLASSES]),
    ("texts that are numbers", REAL.astype(str), "numbers", "D504", [r"y\.astype\(float\)", AS_CLASSES]),
    ("numbers in texts", REAL.astype(str), "auto", "D677", ["'0.1'.*save them as numbers", AS_CLASSES]),
    ("dates", ["2024-01-31", "2024-02-01"] * (N // 2), "auto", "D678", ["labels are dates.*'2024-01-31'", AS_CLASSES]),
    ("texts as sets", TEXTS, "sets", "D504", [AS_CLASSES]),
    ("column of texts", TEXTS[:, None], "auto", "D110", [r"y\[:, 0\]"]),
    ("matrix of texts", np.stack([TEXTS, TEXTS], 1), "sets", "D504", [r"sets need 1 for each member .*\[N, k\]"]),
    ("three axes", REAL.reshape(-1, 1, 1), "auto", "D504", [r"y\.reshape\(len\(y\), -1\)"]),
    ("many numbers as classes", REAL, "classes", "D112", [rf"if labels are numbers, add {AS_NUMBERS}"]),
    ("no axis", np.array(3), "auto", "D110", ["give one label for each sample"]),
]


@pytest.mark.parametrize(("y", "labels", "code", "advised"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
def test_labels_that_do_not_fit_get_advice(y, labels, code, advised):
    with pytest.raises(PefllError, match=rf"PEFLL-{code}\]$") as caught:
        federation_from_arrays(X, y, CLIENT, labels=labels)
    for words in advised:
        assert re.search(words, str(caught.value)), caught.value


# labels, what they were said to be, the code in the sentence, what labels are then said to be, and are
FOLLOWED: list[tuple[Any, str, str, str, str]] = [
    (WHOLE[:, None] > 0, "classes", "y[:, 0]", "classes", "classes"),
    (WHOLE[:, None], "auto", "y[:, 0]", "auto", "classes"),
    (WHOLE[:, None], "auto", "", "numbers", "numbers"),
    (HOT, "classes", "y.argmax(axis=1)", "classes", "classes"),
    (HOT.astype(float), "auto", "y.argmax(axis=1)", "auto", "classes"),
    (HOT.astype(float), "auto", "", "sets", "sets"),
    (WHOLE[:, None].astype(float), "auto", "y[:, 0].astype(int)", "auto", "classes"),
    (WHOLE.astype(str), "numbers", "y.astype(float)", "numbers", "numbers"),
    (TEXTS[:, None], "auto", "y[:, 0]", "auto", "classes"),
    (REAL.reshape(-1, 1, 1), "auto", "y.reshape(len(y), -1)", "numbers", "numbers"),
    (REAL, "classes", "", "numbers", "numbers"),
]


@pytest.mark.filterwarnings("ignore:arrays. each set")
@pytest.mark.parametrize(("y", "labels", "code", "said", "kind"), FOLLOWED)
def test_the_advice_works(y, labels, code, said, kind):
    with pytest.raises(PefllError) as caught:
        federation_from_arrays(X, y, CLIENT, labels=labels)
    assert code in str(caught.value)
    assert f"labels='{said}'" in str(caught.value) or said in ("auto", labels)
    changed = eval(code, {"y": y, "len": len}) if code else y
    assert federation_from_arrays(X, changed, CLIENT, labels=said).labels == kind


def test_the_command_line_advises_tasks():
    with for_the_command_line():
        with pytest.raises(PefllError, match=r"for classes save one column, for numbers add --task regression"):
            federation_from_arrays(X, WHOLE[:, None], CLIENT)
        with pytest.raises(PefllError, match=r"for classes add --task classification, for numbers add --task regr"):
            federation_from_arrays(X, WHOLE, CLIENT, labels="sets")
        with pytest.raises(PefllError, match=r"if labels are numbers, add --task regression"):
            federation_from_arrays(X, REAL, CLIENT, labels="classes")


def test_a_few_fractions_are_mistakes_and_no_numbers():
    y = np.where(np.arange(N) == 3, 1.5, WHOLE)
    with pytest.raises(PefllError, match=r"label 1\.5 of sample 3 .*leave the sample out \[PEFLL-D112\]"):
        federation_from_arrays(X, y, CLIENT, labels="classes")
    gaps = [None, *REAL[1:]]
    frame = pd.DataFrame({"x": X[:, 0], "y": np.array(gaps, dtype=float), "who": CLIENT})
    with pytest.raises(PefllError, match=r"if labels are numbers, add labels='numbers' \[PEFLL-D112\]"):
        pefll.federation_from_frame(frame, "y", "who", labels="classes", missing="drop")


def test_labels_for_a_trained_model_may_have_no_other_kind():
    with pytest.raises(PefllError, match=r"its shape is \[24, 1\]; for classes give one column, y\[:, 0\] .*D110"):
        labels_of(WHOLE[:, None], (), "y")
    with pytest.raises(PefllError, match=r"not numbers; for numbers convert them with y\.astype\(float\) .*D504"):
        labels_of(REAL.astype(str), (), "y", "numbers")


def test_sets_of_one_member_may_be_classes():
    with pytest.warns(UserWarning, match=r"exactly one member; if these are classes, .*y\.argmax\(axis=1\)"):
        assert federation_from_arrays(X, HOT, CLIENT).labels == "sets"
    several = HOT.copy()
    several[0] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation_from_arrays(X, several, CLIENT)
        federation_from_arrays(X, HOT.argmax(axis=1), CLIENT)


@pytest.mark.parametrize(
    ("y", "task", "words"),
    [
        (HOT, pefll.Classification(), r"labels are sets, .* needs classes; .*y\.argmax\(axis=1\).*S500"),
        (np.stack([REAL, REAL], 1), pefll.MultiLabel(), r"labels are numbers, .* needs sets; .*labels='sets'.*S500"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_task_for_other_labels_says_how_to_convert_them(y, task, words):
    with pytest.raises(PefllError, match=words):
        pefll.fit(federation_from_arrays(X, y, CLIENT), "fedavg", task=task, rounds=1)


def test_one_long_text_among_labels_takes_no_memory_for_all():
    labels = np.array(["x" * 100_000] + ["y"] * 999, dtype=object)
    tracemalloc.start()
    with pytest.raises(PefllError, match=r"labels are texts.*PEFLL-D504"):
        federation_from_arrays(np.zeros((1000, 2)), labels, np.arange(1000) % 4, labels="numbers")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000, "with 4 bytes per character, it would be 400 MB"
