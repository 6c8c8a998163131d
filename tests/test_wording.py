"""Numbers, lists and the names of arguments inside sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import pefll
from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted, either, first_few, for_the_command_line, harmless, reasons


def test_one_thing_and_more():
    assert [counted(number, "client") for number in (0, 1, 2, 12_000)] == [
        "0 clients",
        "1 client",
        "2 clients",
        "12,000 clients",
    ]
    assert counted(1, "class") == "1 class"
    assert counted(3, "class") == "3 classes"


def test_a_text_that_a_terminal_would_act_on():
    assert harmless("\x1b[2J\x9b1m\x07a\rb\u202ec\u2066\x7f") == "[2J1mabc"
    assert harmless("\ud800\t") == "\ufffd "
    kept = "Zoë\n≤ 5 · 模型 👩\u200d🔬"
    assert harmless(kept) == kept


def test_the_first_few_names():
    assert first_few([]) == ""
    assert first_few(["ann"]) == "ann"
    assert first_few(["ann", "bob"]) == "ann and bob"
    assert first_few([1, 2, 3]) == "1, 2 and 3"
    assert first_few(range(6)) == "0, 1, 2, 3, 4 and 5"
    assert first_few(range(7)) == "0, 1, 2, 3, 4 and 2 more"
    assert first_few(range(2000), most=2) == "0, 1 and 1,998 more"


def test_several_reasons_have_a_line_each_and_one_has_none():
    errors = {name: PefllError("it is wrong", f"PEFLL-D{number:03}") for number, name in enumerate("abcdefg")}
    assert reasons({"a": errors["a"], "b": errors["a"]}) == ": a: it is wrong [PEFLL-D000] (likewise b)"
    first, *lines = str(PefllError(f"7 clients failed{reasons(errors)}", "PEFLL-M038")).split("\n")
    assert first == "7 clients failed [PEFLL-M038]"
    assert [line.split(":")[0] for line in lines] == ["  a", "  b", "  c", "  d", "  e", "  and 2 more reasons"]


def test_arguments_are_named_as_the_reader_gives_them():
    def said() -> list[str]:
        return [
            argument("eval_every"),
            argument("device", "cpu"),
            argument("partition", "by-class 2"),
            argument("clients", 50),
            argument("client", "writer", option="--client-column"),
            argument("overwrite", True, option="--force"),
            either("a command", "a call"),
        ]

    python = ["eval_every", "device='cpu'", "partition='by-class 2'", "clients=50", "client='writer'"]
    assert said() == [*python, "overwrite=True", "a call"]
    options = ["--eval-every", "--device cpu", "--partition 'by-class 2'", "--clients 50", "--client-column writer"]
    with for_the_command_line():
        assert said() == [*options, "--force", "a command"]
    assert said()[0] == "eval_every", "and after a command that was called from Python too"


def test_whoever_calls_a_function_reads_of_its_arguments(tmp_path):
    samples = pefll.samples_from_arrays(np.zeros((4, 2)), np.arange(4) % 2)
    with pytest.raises(pefll.PefllError, match=r"add clients=50.*PEFLL-D206"):
        pefll.make_federation(samples, partition="by-class 2", clients=None, seed=0)
    with pytest.raises(pefll.PefllError, match=r"omit label='y'.*PEFLL-D181"):
        pefll.load_samples("digits", label="y")
    with pytest.raises(pefll.PefllError, match=r"omit client='writer'.*PEFLL-D181"):
        pefll.load_samples("digits", client="writer")
    with pytest.raises(pefll.PefllError, match=r"pefll\.fit\(federation, out=\.\.\.\) makes one.*PEFLL-R120"):
        pefll.load(tmp_path)


def test_no_error_outside_the_command_line_names_an_option():
    """What a function raises says `argument(...)`: only that knows whether a command is behind it."""
    package = Path(pefll.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        if "cli" in path.relative_to(package).parts:  # they are the command line
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("PefllError", "Diverged"):
                found += [f"{path.name}: {text}" for text in texts(node) if re.search(r"(^|\s)--[a-z]", text)]
    # An option of Flower's own command.
    assert all("--node-config" in sentence for sentence in found), found
    assert len(found) == 1


def texts(node: ast.AST) -> list[str]:
    """The texts in a call, without those that stand inside `argument` or `either`, or whole commands in backticks."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("argument", "either"):
        return []
    if isinstance(node, ast.Constant):
        return [re.sub("`[^`]*`", "", node.value)] if isinstance(node.value, str) else []
    return [text for below in ast.iter_child_nodes(node) for text in texts(below)]
