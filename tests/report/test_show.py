from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.report import show

from .conftest import MakeRun


def test_one_run(make_run: MakeRun, console: Console) -> None:
    folder = make_run("mine", descriptors=True)
    written = show([folder.path], None, console)
    assert written == [folder.path / "curves.png", folder.path / "descriptors.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    text = console.export_text()
    for expected in ("Test accuracy", "80.0 / 70.0", "Cost, on CIFAR-10, by-class 2", "Validation accuracy", "└───"):
        assert expected in text
    assert "standard deviation" not in text
    for path in written:
        assert f"wrote {path}" in text, "unbroken, however long"


def test_several_runs_into_another_folder(make_run: MakeRun, console: Console, tmp_path: Path) -> None:
    folders = [
        make_run("x/run", seed=0, descriptors=True),
        make_run("y/run", seed=1, descriptors=True),
        make_run("other", method="fedavg"),
        make_run("last", seed=2, descriptors=True),
    ]
    out = tmp_path / "out"
    written = show([folder.path for folder in folders], out, console)
    names = ["curves.png", "descriptors-x-run.png", "descriptors-y-run.png", "descriptors-last.png"]
    assert written == [out / name for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    text = console.export_text()
    assert "standard deviation over n seeds" in text
    assert "▁" in text
    assert not (folders[0].path / "curves.png").exists()


def test_runs_of_different_data_are_said_to_be(make_run: MakeRun, console: Console) -> None:
    mine = make_run("mine")
    same = [make_run("seed", seed=1), make_run("fedavg", method="fedavg"), make_run("begun", finished=False, seed=2)]
    other_set = make_run("set", asked={"data": "cifar100", "data_sha256": "x"}, dataset="CIFAR-100")
    other_deal = make_run("deal", seed=3, asked={"partition": "by-class 5", "data_sha256": "y"}, partition="by-class 5")
    other_file = make_run("file", asked={"data_sha256": "z"})
    other_users = make_run("users", seed=4, asked={"min_samples": 5})
    show([mine.path, *(folder.path for folder in same)], None, console)
    assert "different data" not in console.export_text()
    for other, what in (
        (other_set, "CIFAR-10, by-class 2, 100 clients; CIFAR-100, by-class 2, 100 clients"),
        (other_deal, "CIFAR-10, by-class 2, 100 clients; CIFAR-10, by-class 5, 100 clients"),
        (other_file, "mine; file"),  # called the same, and with other samples
        (other_users, "mine; users"),
    ):
        show([mine.path, same[0].path, other.path], None, console)
        sentence = f"These runs have different data ({what}), so their accuracies cannot be compared.\n"
        assert console.export_text().count(sentence) == 1


def test_the_columns_of_a_table(make_run: MakeRun, console: Console) -> None:
    run = make_run()
    row = {"column": "age", "kind": "number", "inputs": 2, "missing": 0.125, "done": "standardised"}
    run.write_columns([row, {"column": "odd"}])
    show([run.path], None, console)
    text = console.export_text()
    assert all(word in text for word in ("Columns of run", "age", "12.5%", "standardised", "odd"))
    run.columns_file.write_text("[]")
    with pytest.raises(PefllError, match="PEFLL-R581"):
        show([run.path], None, console)


def test_a_run_that_has_just_begun(make_run: MakeRun, console: Console) -> None:
    assert show([make_run(finished=False, evaluations=0).path], None, console) == []
    assert "—" in console.export_text()


def test_without_matplotlib_the_tables_are_still_there(
    make_run: MakeRun, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert show([make_run(descriptors=True).path], None, console) == []
    text = console.export_text()
    assert "80.0 / 70.0" in text
    assert text.count("drawing needs matplotlib: pip install matplotlib") == 1


def test_what_is_no_run_is_refused_before_anything_is_printed(
    make_run: MakeRun, console: Console, tmp_path: Path
) -> None:
    for wrong, code in ((tmp_path / "nowhere", "PEFLL-R120"), (tmp_path, "PEFLL-R119")):
        with pytest.raises(PefllError, match=rf"{wrong}\b.*{code}"):
            show([make_run(f"good{len(str(wrong))}").path, wrong], None, console)
    assert console.export_text() == ""
    assert show([], None, console) == []


def test_damage_is_a_sentence(make_run: MakeRun, console: Console) -> None:
    folder = make_run(descriptors=True)
    folder.descriptors_file.write_bytes(b"PK\x03\x04 no")
    with pytest.raises(PefllError, match="PEFLL-O003"):
        show([folder.path], None, console)
