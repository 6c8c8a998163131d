import ast
import pickle
import re
from pathlib import Path

import pytest

import pefll
from pefll.core.errors import Diverged, PefllError
from tests import errors_page


def test_code_stands_behind_the_sentence_and_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(Diverged("it diverged; lower client_lr", code="PEFLL-E012")))
    assert type(error) is Diverged
    assert str(error) == "it diverged; lower client_lr [PEFLL-E012]"
    assert str(PefllError("no code yet")) == "no code yet"
    assert "'PEFLL-E012'" in repr({"ann": error}), "as in predict_each(...).errors"


def test_every_error_has_a_code():
    without = [
        f"{path}:{node.lineno}"
        for path in Path(pefll.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("PefllError", "Diverged", "Refusal", "TooLarge")
        and len(node.args) < 2
        and not any(keyword.arg == "code" for keyword in node.keywords)
    ]
    assert without == []


def test_a_code_means_one_thing():
    found = errors_page.uses()
    assert len(found) > 400
    assert errors_page.clashes(found) == []
    assert {use.code[6] for use in found} == set(errors_page.GROUPS)
    two = [errors_page.Use("PEFLL-D001", "data", "a"), errors_page.Use("PEFLL-D001", "runs", "b")]
    assert errors_page.clashes(two) == ["PEFLL-D001"]


def test_the_page_of_errors_is_up_to_date():
    if errors_page.PAGE.read_text() != errors_page.page(errors_page.uses()):
        pytest.fail("docs/errors.md is not what the source says: run `python -m tests.errors_page`")


def test_packages_to_install_are_named_themselves_and_as_the_extras_have_them():
    """`pip install 'pefll[trackio]'` would fetch pefll from an index, but it comes from a clone or a URL."""
    source = Path(pefll.__file__).parent
    advice = [found for path in source.rglob("*.py") for found in re.findall(r"pip install [^`\n]*", path.read_text())]
    assert len(advice) > 10
    assert not [text for text in advice if "pefll" in text]
    extras = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for wanted in {found for text in advice for found in re.findall(r"\S+==[\d.]*\d", text)}:
        assert f'["{wanted}"]' in extras
