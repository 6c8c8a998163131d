"""Errors about tables of users name the column, the row and what to do."""

from __future__ import annotations

import numpy as np
import pytest

import pefll as package
from pefll.core.errors import PefllError
from pefll.core.wording import for_the_command_line
from pefll.data import federation_from_arrays, federation_from_frame, read_samples
from tests.cli.conftest import pefll, refused  # noqa: F401 - fixtures
from tests.test_personalizing import FEATURES, by_command, table, trained  # noqa: F401 - fixtures

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


def test_a_missing_column_of_labels_is_named_before_the_run_is_blamed(trained):  # noqa: F811
    run, mine = package.load(trained), table(["ann"])
    embedder = run.embedder()
    for use in (run.personalize, embedder.describe):
        with pytest.raises(PefllError, match=r"no column 'label' with labels.*PEFLL-M056"):
            use(mine.rename(columns={"label": "lable"}))
        with pytest.raises(PefllError, match=r"'label' holds no label, but this run needs labels.*PEFLL-T122"):
            use(mine.assign(label=None))
        with pytest.raises(PefllError, match=r"none of the 12 samples has a label, but.*PEFLL-T122"):
            use(mine[FEATURES], [None] * 12)
        with pytest.raises(PefllError, match=r"^this run needs labels.*PEFLL-T122"):
            use(mine[FEATURES].to_numpy())
    frame = table(["ann", "bob"])
    frame.loc[frame.user_id == "bob", "label"] = None
    with pytest.raises(package.ClientsFailed, match="bob: none of the 12 samples has a label"):
        run.personalize_each(frame)


def test_an_embedder_does_not_advise_what_only_a_run_has(trained):  # noqa: F811
    embedder = package.load(trained).embedder()
    with pytest.raises(PefllError, match=r"2 clients.*embedder\.describe.*groupby\('user_id'\)") as error:
        embedder.describe(table(["ann", "bob"]))
    assert "personalize_each" not in str(error.value)


def test_rows_without_a_client_are_counted_and_the_first_is_named(refused, trained, by_command, tmp_path):  # noqa: F811
    run, frame = package.load(trained), table(["ann", "bob"]).astype({"user_id": object})
    frame.loc[4, "user_id"] = None
    words = r"'user_id' names no client in 1 of 24 rows, the first of which is row 5.*PEFLL-D111"
    with pytest.raises(PefllError, match=words):
        run.personalize_each(frame)
    with pytest.raises(PefllError, match=words):
        federation_from_frame(frame, "label", "user_id")
    frame.to_csv(tmp_path / "users.csv", index=False)
    refused("personalize", by_command, "--data", tmp_path / "users.csv", "--each", "--out", tmp_path / "m", match=words)
    with pytest.raises(PefllError, match=r"client mixes types or has empty entries, such as 7 in row 2"):
        federation_from_arrays(np.zeros((3, 2)), [0, 1, 0], ["a", 7, "b"])


def test_labels_of_another_kind_name_their_column():
    x, rng = pandas.DataFrame({"f": np.arange(24.0), "user": ["a", "b", "c"] * 8}), np.random.default_rng(0)
    y = rng.integers(0, 2, 24)
    run = package.fit(federation_from_frame(x.assign(liked=y), "liked", "user"), rounds=1, processes=1)
    mine = x[x.user == "a"].assign(liked=[0, 1] * 4)
    with pytest.raises(PefllError, match=r"the column 'liked' of labels: .*'no', .*as in the training data.*D108"):
        run.personalize(mine.assign(liked=["yes", "no"] * 4))
    with pytest.raises(PefllError, match=r"the column 'liked' of labels: .*label 2, .*subtract 1.*D139"):
        run.personalize(mine.assign(liked=[1, 2] * 4))
    with pytest.raises(PefllError, match=r"label 5, .*correct it.*D139"):
        run.personalize(mine.assign(liked=[1, 5] * 4))


def test_sentences_for_the_command_line_need_no_python(tmp_path):
    frame = pandas.DataFrame({"f": np.arange(24.0), "client": ["a", "b", "c"] * 8, "label": [0.0, 1.0] * 12})
    with pytest.raises(PefllError, match=r"y\.astype\(int\).*D113"):
        federation_from_frame(frame, "label", "client")
    frame.to_csv(tmp_path / "a.csv", index=False)
    with for_the_command_line(), pytest.raises(PefllError, match=r"save them as whole numbers.*D113") as error:
        read_samples(tmp_path / "a.csv")
    assert "astype" not in str(error.value)


def test_a_csv_in_utf_16_is_called_so(tmp_path):
    for name, encoding in (("utf-16", "utf-16"), ("latin1", "latin-1")):
        path = tmp_path / f"{name}.csv"
        path.write_text("client,label,f\nZoë,0,1\nZoë,1,2\n", encoding=encoding)
        with pytest.raises(PefllError, match=rf"iconv -f {name} .*D597"):
            read_samples(path)


def test_a_boolean_column_asks_for_true_or_false():
    frame = pandas.DataFrame({"f": [True, False] * 12, "user": ["a", "b", "c"] * 8, "y": ["n", "n", "y", "y"] * 6})
    run = package.fit(federation_from_frame(frame, "y", "user"), rounds=1, processes=1)
    mine = frame[frame.user == "a"].astype({"f": object})
    mine.iloc[3, 0] = "yes"
    with pytest.raises(PefllError, match=r"'f' has the text 'yes' in row 4 where true or false is needed.*D587"):
        run.personalize(mine)


def test_a_table_without_a_column_lists_few_and_says_what_to_do(trained):  # noqa: F811
    run, mine = package.load(trained), table(["ann"])
    wide = mine.assign(**{f"more{number}": 0 for number in range(30)}).drop(columns="f3")
    with pytest.raises(PefllError, match=r"no column 'f3'.*add it, or rename .*and \d+ more.*M030") as error:
        run.personalize(wide)
    assert len(str(error.value)) < 250
    assert "did you mean" not in str(error.value)
    for others, words in (({"f3": "F3"}, r"mean 'F3'\?"), ({"f3": "F3", "f1": "F_1"}, r"'F_1' for 'f1' and 'F3' ")):
        with pytest.raises(PefllError, match=words):
            run.personalize(wide.assign(f3=0).rename(columns=others))


def test_nothing_to_score_is_an_error(refused, pefll, tmp_path):  # noqa: F811
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    split = ["train", "validation"] * 20
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) // 5, split=split)
    words = ("--rounds", 1, "--clients-per-round", 2, "--processes", 1, "--data-dir", tmp_path)
    assert pefll("train", "--data", tmp_path / "a.npz", *words, "--out", tmp_path / "run").code == 0
    refused("evaluate", tmp_path / "run", match=r"no client has a test sample.*--split.*C641")
    assert pefll("evaluate", tmp_path / "run", "--split", "train").code == 0
