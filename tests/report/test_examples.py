"""The examples of docs/comparing.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pefll
from tests.test_documents import ROOT, python_of

PAGE = ROOT / "docs" / "comparing.md"


@pytest.mark.parametrize("word", ["pefll.compare", "run.predictions"])
def test_examples_run(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    code = python_of(PAGE, word)
    assert sum(1 for line in code.splitlines() if line) <= 15
    few = "rounds=1, clients_per_round=2, processes=1"
    names: dict[str, Any] = {}
    if word == "pefll.compare":
        code = code.replace("clients=40", "clients=8").replace("(0, 1)", "(0,)")
    exec(code.replace("rounds=100", few).replace("rounds=20", few), names)
    said = capsys.readouterr().out
    if word == "pefll.compare":
        assert (tmp_path / "table.tex").read_text() == said.removesuffix("\n")
        assert said.count(r"\textbf") >= 4
        assert [row.runs.label for row in names["comparison"].rows] == ["fedavg", "knn-per", "pefll"]
    else:
        assert isinstance(names["model"], pefll.PersonalModel)
        assert set(names["found"].client) == {7, 39}
        assert "seen_per_sample" in said
