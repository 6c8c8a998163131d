"""Locales without UTF-8: files are UTF-8 anyway, and the console shows other letters as question marks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pefll.cli.options import column_names
from pefll.runs.config import Config

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


@pytest.mark.parametrize("kind", ["locale", pytest.param("output", marks=pytest.mark.slow)])
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


def test_columns_and_clients_with_other_letters_are_found(tmp_path):
    rows = [f"{row % 7},{row % 3},{'jä' if row % 2 else 'nein'},ü{row % 4}" for row in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["größe,b,étiquette,wär", *rows]), encoding="utf-8")
    columns = ["--data", "t.csv", "--label", "étiquette", "--client-column", "wär"]
    chosen = ["--features", "größe,b", "--treat", "größe=number", "--unseen-clients", "ü1"]
    quick = ["--rounds", "2", "--clients-per-round", "2", "--processes", "1", "--set", "local_steps=1"]
    run_cli(tmp_path, ASCII["locale"], "train", *columns, *chosen, *quick, "--method", "fedavg", "--out", "r")
    settings = (tmp_path / "r" / "config.toml").read_text(encoding="utf-8")
    assert all(words in settings for words in ('"étiquette"', '"wär"', '"größe,b"', '"größe=number"', '"ü1"'))
    run_cli(tmp_path, ASCII["locale"], "train", "--resume", "r", "--rounds", "3")
    run_cli(tmp_path, ASCII["locale"], "evaluate", "r", *columns)


def test_names_of_columns_are_utf8_in_any_locale():
    escaped = "étiquette".encode().decode("ascii", "surrogateescape")
    config = Config(**dict.fromkeys(("label", "client_column", "features", "drop", "time_column"), escaped))
    named = (config.label, config.client_column, config.features, config.drop, config.time_column)
    assert set(named) == {"étiquette"}
    assert column_names(escaped) == column_names("étiquette") == "étiquette"
    assert column_names(None) is None
