"""Makes docs/errors.md from the source: `python -m tests.errors_page`.

An error is a call with a code: `PefllError(sentence, code="PEFLL-D135")`, one of its subclasses, or a function that
passes a code on.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "pefll", ROOT / "docs" / "errors.md"
CODE = re.compile(r"PEFLL-([A-Z])\d{3}")
# What the errors of a letter are about, and what to do where a sentence does not say it.
GROUPS = {
    "A": ("Arguments, names and files", "Give the argument, name or file that the sentence asks for."),
    "C": ("The command line", "See `pefll VERB --help`."),
    "D": ("Data and federations", "Mend the data, or leave the sample, client or column out."),
    "E": ("Engines", "Try `--engine serial --processes 1`, which says most about what fails."),
    "F": ("Real clients (Flower)", "See [deploy](deploy.md)."),
    "G": ("Guarantees", "Change the argument that the sentence names, or test more clients."),
    "L": ("Limits of memory", "Take less data, a smaller model or fewer clients a round."),
    "M": ("Personal models", "Make the model again with `pefll personalize`, or give samples like the run's."),
    "N": ("Networks", "Change the network as the sentence says."),
    "O": ("Reports and figures", "Train the run to its end, or put back the file that is damaged."),
    "P": ("What a client's owner allows", "Ask the owner, who sets limits in `client.toml`."),
    "R": ("Run folders and checkpoints", "Put back the file, or start the run anew in another folder."),
    "S": ("Methods and their hyper-parameters", "See `pefll methods NAME`."),
    "T": ("Training and evaluation", "Change the argument that the sentence names."),
    "X": ("Experiments", "See `pefll VERB --help`."),
}
# Functions that put their argument into words.
TELL_OF = {"shown", "_size", "_gb", "_gigabytes", "error_line", "first_line", "first_few"}
TELL_OF |= {"join", "repr", "str", "list", "tuple", "min", "int"}
ADVICE = re.compile(r"(pip|use|make|give|add|start|choose|put|mend|say|leave|write|see|`pefll|train|end)\b")
COLUMNS = "| code | what is wrong | what to do |\n| --- | --- | --- |\n"
HEAD = """# Errors

Every error ends with its code, for example `[PEFLL-D135]`. A code keeps its meaning when its sentence is worded anew.
In Python it is `error.code` of a `pefll.PefllError`. ‹name› stands for a value.

A command exits with 0 if it is done, with 2 after an error, with 3 if it is done for some clients but not for all, with
1 if a check fails or for an error of this package, and with 130 after Ctrl-C.

`python -m tests.errors_page` makes this page from the source.
"""


class Use(NamedTuple):
    """A place that raises an error."""

    code: str
    room: str  # the folder of src/pefll
    sentence: str


def uses() -> list[Use]:
    """Return every place in the source that gives an error its code, in the order of codes."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = dict(_constants(tree))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "code")]
            for place, value in enumerate(given):
                name = value.value if isinstance(value, ast.Constant) else constants.get(getattr(value, "id", ""))
                if place and isinstance(name, str) and CODE.fullmatch(name):
                    # The sentence, or what stands for it, comes before the code.
                    found.append(Use(name, path.relative_to(SOURCE).parts[0], _text(given[place - 1])))
    return sorted(found)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.args
            for argument, default in zip(arguments[::-1], node.args.defaults[::-1], strict=False):
                if argument.arg == "code" and isinstance(default, ast.Constant):
                    yield "code", default.value
        if isinstance(node, ast.Assign) and node in tree.body:
            target = node.targets[0]
            names, values = (part.elts if isinstance(part, ast.Tuple) else [part] for part in (target, node.value))
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                    yield name.id, value.value


def _text(node: ast.expr) -> str:
    """Return a sentence with its placeholders."""
    match node:
        case ast.Constant(value):
            return str(value)
        case ast.JoinedStr(parts):
            return "".join(_text(part) for part in parts)
        case ast.FormattedValue(value):
            return _text(value)
        case ast.Call(ast.Name("argument"), [ast.Constant(name), *rest], keywords):
            option = next((ast.literal_eval(key.value) for key in keywords if key.arg == "option"), f"--{name}")
            return " ".join([option.replace("_", "-"), *map(_text, rest)])
        case ast.Call(ast.Name("counted"), [_, thing]):
            return f"‹number› {_text(thing)}{'es' if _text(thing).endswith('s') else 's'}"
        case ast.Call(ast.Name("either"), [first, *_]):
            return _text(first)
        case ast.IfExp(_, one, other):
            return _text(one) or _text(other)
        case ast.Call(ast.Name(name) | ast.Attribute(_, name), [inner, *_]) if name in TELL_OF:
            return _text(inner)
        case ast.BoolOp(_, [first, *_]) | ast.Call(ast.Name("map"), [_, first]):
            return _text(first)
        case ast.Call(ast.Name("len")):
            return "‹number›"
        case ast.Name(name) | ast.Attribute(_, name) | ast.Call(ast.Name(name) | ast.Attribute(_, name)):
            return f"‹{name.strip('_').replace('_', ' ').lower()}›"
        case ast.Subscript(value, ast.Constant(str(name))):
            return f"‹{name}›"
        case ast.Subscript(value) | ast.BinOp(value):
            return _text(value)
    return "‹…›"


def clashes(found: list[Use]) -> list[str]:
    """Return the codes that mean two things: of two rooms, with different sentences."""
    rooms: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for use in found:
        rooms[use.code][use.room].add(use.sentence)
    return [code for code, each in rooms.items() if len(each) > 1 and len(set().union(*each.values())) > 1]


def page(found: list[Use]) -> str:
    """Return the page."""
    by_code: dict[str, list[str]] = defaultdict(list)
    for use in found:
        if use.sentence not in by_code[use.code]:
            by_code[use.code].append(use.sentence)
    parts = [HEAD]
    for letter, (title, advice) in GROUPS.items():
        parts.append(
            f"\n## {letter}: {title}\n\n{advice}\n\n| code | what is wrong | what to do |\n| --- | --- | --- |\n"
        )
        for code, sentences in by_code.items():
            if code[6] == letter:
                parts += [f"| {code} | {wrong} | {todo} |\n" for wrong, todo in map(_split, sentences)]
    return "".join(parts)


def _split(sentence: str) -> tuple[str, str]:
    """Return what is wrong and what to do; the latter is empty where the sentence has one part."""
    plain = sentence.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    wrong, mark, todo = plain.rpartition("; ")
    if not mark:
        wrong, mark, todo = plain.rpartition(": ")
        if not mark or not re.match(
            r"(pip|use|make|give|add|start|choose|put|mend|say|leave|write|see|`pefll|train|end)\b", todo
        ):
            return plain, ""
    return wrong, todo


if __name__ == "__main__":
    PAGE.write_text(page(uses()))
