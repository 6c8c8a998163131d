"""Checks of a task's settings, and a task as text: `"regression loss_name=huber"`."""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pefll.core.arguments import number, plain, shown
from pefll.core.errors import PefllError, unknown
from pefll.core.plugins import import_name
from pefll.tasks.metrics import Metric

_LONGEST_CALL = 10_000  # letters; Python's parser takes more time and memory for longer ones
_IN_PYTHON = "<in-Python>"  # stands in a text for a function that cannot be named


def constants(values: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as a tensor [n] with the type and device of `like`; a CUDA graph can record it."""
    # Each is filled on the device, because a graph cannot record a copy from the host.
    parts = [torch.full((1,), value, dtype=like.dtype, device=like.device) for value in values]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def numbers(values: Any, name: str) -> tuple[float, ...]:
    """Return a list or an array of finite numbers as a tuple."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise PefllError(f"{name} is {shown(values)}; it must be a list of numbers", code="PEFLL-S510")
    return tuple(number(each, name) for each in values)


def check_at_least(value: Any, name: str, least: float, most: float = math.inf, *, inclusive: bool = True) -> None:
    """Raise PefllError unless a setting is a number from `least` to below `most`."""
    found = number(value, name)
    if not (least <= found if inclusive else least < found) or not found < most:
        below = f" and below {most:g}" if most < math.inf else ""
        raise PefllError(
            f"{name} is {found:g}; it must be {'at least' if inclusive else 'above'} {least:g}{below}", "PEFLL-S511"
        )


def check_function(value: Any, name: str) -> None:
    """Raise PefllError unless a setting is a function or None."""
    if value is not None and not callable(value):
        advice = "it must be a function (output, y) -> [b]"
        if isinstance(value, str):
            place = ":".join(value.rpartition(".")[::2]) if "." in value else f"mine:{value}"
            advice = f"write module:function, such as {name}={place} for a function in {place.partition(':')[0]}.py"
        raise PefllError(f"{name} is {shown(value)}; {advice}", code="PEFLL-S512")


def chosen_metrics(values: Any, known: Collection[str]) -> tuple[Any, ...]:
    """Return metrics, given as names among `known` or as `Metric`, as a tuple."""
    if isinstance(values, str | Metric):
        values = (values,)
    if not isinstance(values, Sequence):
        raise PefllError(f"extra is {shown(values)}; it must be a list of metrics", code="PEFLL-S513")
    for each in values:
        if isinstance(each, str) and each not in known:
            raise unknown("metric", each, [*known, "a pefll.Metric (in a text module:name)"])
        if not isinstance(each, str | Metric):
            raise PefllError(f"extra has {shown(each)}; each must be a name or a pefll.Metric", code="PEFLL-S501")
    return tuple(values)


def text_of(task: Any, name: str, without: Collection[str] = ()) -> str:
    """Return a task as text: its name and the settings that differ from their defaults, without some of them."""
    words = [name]
    for each in dataclasses.fields(task) if dataclasses.is_dataclass(task) else ():
        value = getattr(task, each.name)
        if each.name not in without and each.init and value != each.default:
            words.append(f"{each.name}={_text(value)}")
    return " ".join(words)


def _text(value: Any, of_code: Callable[[Any], str] = lambda value: _IN_PYTHON) -> str:
    value = plain(value)
    if isinstance(value, list | tuple):
        return ",".join(_text(each, of_code) for each in value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | None):
        return repr(value)
    return place_of(value) or of_code(value)


def with_names(text: str, task: Any) -> str:
    """Return the text of a task for people: code that cannot be imported by name has the name of its function or class.

    Nobody can read such a text back.
    """
    words = []
    for word in text.split():
        name, equals, value = word.partition("=")
        words.append(f"{name}={_text(getattr(task, name, None), _name)}" if equals and _IN_PYTHON in value else word)
    return " ".join(words)


def _name(value: Any) -> str:
    """Return the name of a function, of a metric, or of an object's class, as `<name>`."""
    value = getattr(value, "func", value)  # that of a partial
    name = value.name if isinstance(value, Metric) else getattr(value, "__name__", type(value).__name__)
    return f"<{name.strip('<>')}>"


def place_of(value: Any) -> str:
    """Return where a function, class or module-level object is, `"package.module:name"`; "" if it has no such place."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if isinstance(value, Metric):  # an object knows no module, so look for a function of its own that does
        module = getattr(value.values, "__module__", "")
        held = vars(sys.modules[module]) if module in sys.modules else {}
        name = next((key for key, one in held.items() if one is value), "")
    if not module or not name or module == "__main__" or "<" in name:
        return ""
    found = reduce(lambda at, part: getattr(at, part, None), name.split("."), sys.modules.get(module))
    return f"{module}:{name}" if found is value and "." not in name else ""


def words_of(text: str) -> list[str]:
    """Return the name in the text of a task, and its settings NAME=VALUE.

    A call, such as `"mine:GCE(q=0.4, k=2)"`, is another way to write `"mine:GCE q=0.4 k=2"`.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket or len(name.split()) != 1 or len(text) > _LONGEST_CALL:
        return text.split()
    one_word = ["".join(text.split())]
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return one_word  # whoever looks for the name says what to write
        if not all(each.arg for each in call.keywords):
            return one_word
        return [name.strip(), *(f"{each.arg}={_written(each.value)}" for each in call.keywords)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return one_word


def _written(value: ast.expr) -> str:
    """Return a value in a call as the value of NAME=VALUE."""
    if isinstance(value, ast.Tuple | ast.List):
        return ",".join(map(_written, value.elts))
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return "".join((value.value if is_text else ast.unparse(value)).split())  # type: ignore[attr-defined]


def settings_in(words: Sequence[str], kind: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings in the words of a text, with the types of the dataclass `kind`'s fields."""
    if words and not dataclasses.is_dataclass(kind):
        raise PefllError(f"{kind.__name__} is no dataclass, so it has no setting {words[0]!r}", code="PEFLL-S514")
    fields = {each.name: each for each in dataclasses.fields(kind) if each.init} if words else {}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise PefllError(f"a setting of a task is NAME=VALUE, not {word!r}", code="PEFLL-S515")
        if name not in fields and name in vars(kind).get("__annotations__", {}):
            raise PefllError(
                f"{name!r} is no setting of the task {kind.__name__}, because the class has no decorator; write "
                "@dataclass(frozen=True) above it",
                code="PEFLL-S668",
            )
        if name not in fields:
            raise unknown(f"setting of the task {kind.__name__}", name, fields)
        if name not in without:
            found[name] = _read(value, fields[name], name)
    return found


def check_has_names(words: Sequence[str]) -> None:
    """Raise PefllError if a setting in the words of a text was given in Python and cannot be imported."""
    for name, _, value in (word.partition("=") for word in words):
        if _IN_PYTHON in value:
            raise PefllError(
                f"the task's {name} was given in Python and has no name; load it in Python with task=...",
                code="PEFLL-S516",
            )


def differing(text: str, other: str) -> list[str]:
    """Return the names of settings that differ between two texts of tasks. Code may have moved to another module."""
    first, second = (dict(word.partition("=")[::2] for word in one.split()[1:]) for one in (text, other))
    return [name for name in (first | second) if not _same(first.get(name, ""), second.get(name, ""))]


def _same(value: str, other: str) -> bool:
    parts, others = ([part.rpartition(":")[2] for part in each.split(",")] for each in (value, other))
    same = (a == b or (_IN_PYTHON in (a, b) and a and b) for a, b in zip(parts, others, strict=False))
    return len(parts) == len(others) and all(same)


def _read(value: str, field: Any, name: str) -> Any:
    default = field.default
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, int | float):
            return type(default)(value)
        if isinstance(default, tuple):
            return tuple(_member(each) for each in value.split(","))
    except (ValueError, KeyError):
        raise PefllError(f"the task's {name} cannot be {value!r}", code="PEFLL-S517") from None
    return import_name(value, "task") if ":" in value else value


def _member(word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        return import_name(word, "task") if ":" in word else word
