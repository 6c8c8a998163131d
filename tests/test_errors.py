import ast
import pickle
from pathlib import Path

import pefll
from pefll.core.errors import Diverged, PefllError


def test_code_stands_behind_the_sentence_and_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(Diverged("it diverged; lower client_lr", code="PEFLL-T001")))
    assert type(error) is Diverged
    assert str(error) == "it diverged; lower client_lr [PEFLL-T001]"
    assert str(PefllError("no code yet")) == "no code yet"


def test_every_error_has_a_code():
    without = [
        f"{path}:{node.lineno}"
        for path in Path(pefll.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("PefllError", "Diverged")
        and len(node.args) < 2
        and not any(keyword.arg == "code" for keyword in node.keywords)
    ]
    assert without == []
