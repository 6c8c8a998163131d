"""A method's file is short: docs/methods.md says how short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pefll.methods

NEW = ("fedprox", "scaffold", "ditto", "apfl", "fedper", "lg_fedavg", "fedbabu", "odpfl_hn")
MOST = 60


def lines_of_code(text: str) -> int:
    """Return the number of lines with code, without imports, docstrings and comments."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring:
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in left_out for number, line in lines)


def test_lines_are_counted():
    assert lines_of_code('"""One."""\nimport os\n\n# Two.\ndef f():\n    """Three."""\n    return os\n') == 2


@pytest.mark.parametrize("name", NEW)
def test_a_method_has_at_most_as_many_lines_as_the_page_says(name):
    text = (Path(pefll.methods.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert lines_of_code(text) <= MOST
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    assert f"Each is at most {MOST} lines of code without imports and docstrings." in page
