"""Runs that are finished: evaluated, shown, damaged."""

from __future__ import annotations

import json

import pytest

from pefll.runs import checkpoint
from pefll.runs.record import RunFolder


def test_train_evaluate_show(pefll, labelled, tmp_path):
    said = pefll("evaluate", labelled, "--json")
    result = json.loads(said.out)
    summary = RunFolder(labelled).summary()
    for group in ("seen", "unseen"):
        assert result[group] == pytest.approx(summary["accuracy"]["best"][group])
    said = pefll("evaluate", labelled, "--split", "validation")
    assert "Validation accuracy" in said.out
    assert "worst tenth" in said.out
    said = pefll("evaluate", labelled, "--mask-labels")
    assert "masked" in said.out
    assert "worst tenth" not in said.out
    said = json.loads(pefll("evaluate", labelled, "--json", "--set", "refine_steps=5", "--set", "refine_lr=0.1").out)
    assert said["settings"] == {"refine_steps": 5, "refine_lr": 0.1}
    assert said["unseen"]["loss"] != pytest.approx(result["unseen"]["loss"])
    assert "PEFLL-T131" in pefll("evaluate", labelled, "--set", "client_lr=0.1").err
    said = pefll("show", labelled, "--out", tmp_path)
    assert said.code == 0
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_runs_that_are_damaged(pefll, refused, labelled, client, tmp_path):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(labelled, folder)
    good = pefll("evaluate", folder, "--json").out
    history = (folder / "history.jsonl").read_text()
    (folder / "history.jsonl").write_text('{"a": 1}\n')
    refused("results", "add", folder, "--to", tmp_path / "results", match=r"line 1\b.*PEFLL-R008")
    (folder / "history.jsonl").write_text(history)
    newest, older = sorted((folder / "checkpoints").iterdir(), reverse=True)
    state = newest / checkpoint.TENSORS
    state.write_bytes(state.read_bytes()[:1000])
    said = pefll("evaluate", folder, "--json")
    assert said.code == 0
    assert "is damaged: state.safetensors has 1,000 bytes" in said.err
    rounds = [int(each.name.removeprefix("round-")) for each in (older, newest)]
    assert f"copy is at round {rounds[0]} of {rounds[1]}; the best round so far, " in said.err
    assert " is at round " not in pefll("evaluate", labelled, "--json").err
    assert json.loads(said.out).keys() == json.loads(good).keys()
    (older / checkpoint.MANIFEST).write_text("{")
    for arguments in (
        ("evaluate", folder),
        ("train", "--resume", folder),
        ("personalize", folder, "--data", client, "--out", tmp_path / "m"),
    ):
        said = pefll(*arguments)
        assert said.code == 2
        *notes, error = said.err.splitlines()
        assert "PEFLL-R007" in error
        assert all("damaged" in note for note in notes)
    shutil.rmtree(folder / "checkpoints")
    assert "PEFLL-R015" in refused("evaluate", folder)
    (folder / "config.toml").write_text("rouns = 3")
    refused("evaluate", folder, match=r"'rouns'.*PEFLL-A101")


def test_show_takes_a_folder_of_runs(pefll, refused, labelled, tmp_path):
    import shutil

    for name in ("a/one", "b/one", ".hidden"):
        shutil.copytree(labelled, tmp_path / "runs" / name)
    said = pefll("show", tmp_path / "runs", "--out", tmp_path / "p", "--format", "svg", "--table", "md,tex, csv")
    assert said.code == 0
    assert "a/one" in said.out
    written = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"comparison.md", "comparison.tex", "comparison.csv", "curves.svg", "descriptors-b-one.svg"} <= written
    (tmp_path / "nothing").mkdir()
    assert "PEFLL-R120" in refused("show", tmp_path / "nothing")
    assert "PEFLL-A101" in refused("show", labelled, "--table", "xls")
