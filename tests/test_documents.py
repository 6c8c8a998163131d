"""README and docs: their examples run, their links lead somewhere, and the README stays short."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.func import vjp

import pefll
from pefll.core.tree import leaves
from pefll.methods.contract import each, everyone

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def python_of(page: Path, word: str) -> str:
    """Return the one Python example of a page that has a word in it."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if word in code]
    return block


def anchors_of(page: Path) -> set[str]:
    """Return what links within a page may name: its headings, as the usual viewers write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_the_ten_lines_run(capsys):
    names: dict[str, object] = {}
    exec(python_of(README, "pefll.fit"), names)  # as a reader would
    assert re.match(r"seen \d+\.\d%, unseen \d+\.\d%\n", capsys.readouterr().out)
    assert isinstance(names["model"], torch.nn.Module)


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "methods.md"], ids=lambda page: page.name)
def test_the_round_that_is_shown_is_that_of_the_method(page, monkeypatch):
    names = {"vjp": vjp, "each": each, "everyone": everyone}
    exec(python_of(page, "def round(self, server, cohort):\n    v ="), names)

    @dataclass(frozen=True)
    class Shown(pefll.PeFLL):
        round = names["round"]

    module = ModuleType("shown")
    module.Shown = Shown
    monkeypatch.setitem(sys.modules, "shown", module)
    samples = pefll.load_samples("digits")
    federation = pefll.make_federation(samples, partition="by-class 3", clients=10, seed=0)
    settings = {"rounds": 2, "model": "tiny", "local_steps": 2, "clients_per_round": 3, "precision": "float64"}
    ours, shown = (pefll.fit(federation, method, **settings) for method in ("pefll", "shown:Shown"))
    for mine, other in zip(leaves(ours.server), leaves(shown.server), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors_of(there), target
