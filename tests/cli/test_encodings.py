"""Locales without UTF-8: files are UTF-8 anyway, and the console shows other letters as question marks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASCII = {
    "locale": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
    "output": {"PYTHONIOENCODING": "ascii"},
}


def run_cli(folder: Path, changes: dict[str, str], *arguments: str) -> str:
    """Return what a command prints to both outputs; it must succeed."""
    command = [sys.executable, "-m", "pefll", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, env=os.environ | changes)
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    assert done.returncode == 0, said
    return said


@pytest.mark.parametrize("kind", ASCII)
def test_commands_work_without_utf8(tmp_path, kind):
    rows = [f"ü{row % 4},{row % 7},{row % 3},{'jä' if row % 2 else 'nein'}" for row in range(80)]
    (tmp_path / "tablä.csv").write_text("\n".join(["user,größe,b,liked", *rows]), encoding="utf-8")
    data = ["--data", "tablä.csv", "--label", "liked", "--client-column", "user"]
    quick = ["--rounds", "2", "--clients-per-round", "2", "--processes", "1", "--set", "local_steps=1"]
    run_cli(tmp_path, ASCII[kind], "train", *data, *quick, "--method", "fedavg", "--out", "rä")
    settings = (tmp_path / "rä" / "config.toml").read_text(encoding="utf-8")
    assert "/tablä.csv" in settings, "the name as a locale with UTF-8 gives it"
    run_cli(tmp_path, ASCII[kind], "train", "--resume", "rä", "--rounds", "3")
    run_cli(tmp_path, {"PYTHONUTF8": "1"}, "train", "--resume", "rä", "--rounds", "4")
    assert "?" in run_cli(tmp_path, ASCII[kind], "show", "rä")
    run_cli(tmp_path, ASCII[kind], "data", "summary", *data[1:])
    run_cli(tmp_path, ASCII[kind], "train", "--help")


@pytest.mark.parametrize("kind", ASCII)
def test_columns_and_clients_with_other_letters_are_found(tmp_path, kind):
    rows = [f"{row % 7},{row % 3},{'jä' if row % 2 else 'nein'},ü{row % 4}" for row in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["größe,b,étiquette,wär", *rows]), encoding="utf-8")
    columns = ["--label", "étiquette", "--client-column", "wär"]
    quick = ["--rounds", "2", "--clients-per-round", "2", "--processes", "1", "--set", "local_steps=1"]
    chosen = ["--features", "größe", "--unseen-clients", "ü1"]
    data = ["--data", "t.csv", *columns, *chosen]
    run_cli(tmp_path, ASCII[kind], "data", "summary", "t.csv", *columns, "--drop", "größe", "--treat", "b=number")
    run_cli(tmp_path, ASCII[kind], "train", *data, *quick, "--method", "fedavg", "--out", "r")
    settings = (tmp_path / "r" / "config.toml").read_text(encoding="utf-8")
    assert all(words in settings for words in ('"étiquette"', '"wär"', '"größe"', '"ü1"'))
    run_cli(tmp_path, ASCII[kind], "train", "--resume", "r", "--rounds", "3")
    run_cli(tmp_path, ASCII[kind], "evaluate", "r", "--data", "t.csv", *columns)
    run_cli(tmp_path, ASCII[kind], "personalize", "r", "--data", "t.csv", *columns, "--each", "--out", "models")
    run_cli(tmp_path, ASCII[kind], "predict", "models", "--data", "t.csv", *columns)


def test_a_column_that_is_not_there_is_named_by_its_letters(tmp_path):
    (tmp_path / "t.csv").write_text("größe,étiquette,client\n1,a,b\n2,b,b\n", encoding="utf-8")
    with pytest.raises(AssertionError) as said:
        run_cli(tmp_path, ASCII["locale"], "data", "summary", "t.csv", "--label", "étiquete")
    assert r"no column '\xe9tiquete'" in str(said.value)
    assert "PEFLL-D176" in str(said.value)
    assert "Traceback" not in str(said.value)
