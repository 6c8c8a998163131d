"""Damage the files of personal models in thousands of ways, and count what is refused.

python -m tests.faults.personal_models --count 10000 --out results/faults.json

Every file is loaded in Python and classified with on the command line. A damage is `refused` where both answer with
one sentence; `accepted_identical` where the model is the same all the same; `accepted_silently` where it is another one
and nobody says so; a `traceback` where something else than a sentence comes out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import typer
from rich.console import Console

import pefll
from pefll.cli import main as command_line
from pefll.core.errors import PefllError
from pefll.core.progress import monitor
from pefll.models.spec import ModelSpec
from pefll.runs import modelfile
from pefll.runs.personal import PersonalModel
from tests.faults.record import FILE, record

Rng = np.random.Generator
OUTCOMES = ("refused", "accepted_identical", "accepted_silently", "tracebacks")
MOST_MEMORY = 6 << 30  # bytes of addresses: what asks for more ends in an error, and is counted


class Subject(NamedTuple):
    """A whole file, and what its model says.

    Attributes:
        name: of the kind of model.
        content: of the file.
        data: an .npz with samples.
        x: these samples.
        wanted: their probabilities.
    """

    name: str
    content: bytes
    data: Path
    x: Any
    wanted: Any

    @property
    def facts(self) -> dict[str, Any]:
        """What the file says of its model."""
        return json.loads(self.header["__metadata__"]["facts"])

    @property
    def header(self) -> dict[str, Any]:
        """The file's header."""
        return json.loads(self.content[8 : 8 + int.from_bytes(self.content[:8], "little")])

    @property
    def tensors(self) -> dict[str, Any]:
        """The file's tensors."""
        return safetensors.torch.load(self.content)


def subjects(folder: Path) -> list[Subject]:
    """Train small runs of four kinds and return a personal model of each."""
    rng = np.random.default_rng(0)
    client, y = np.repeat(np.arange(6), 16), rng.integers(0, 3, 96)
    columns = {f"f{number}": rng.normal(size=96) + y for number in range(5)}
    frame = columns | {"label": np.array(["ant", "bee", "cow"])[y], "client": client}
    pixels = rng.integers(0, 256, (96, 1, 8, 8), dtype=np.uint8)
    texts = rng.integers(0, 3, (96, 6))
    small: dict[str, Any] = {"rounds": 1, "clients_per_round": 2, "local_steps": 1, "processes": 1}
    kinds = {
        "features": ("pefll", "mlp", pefll.federation_from_frame(frame, label="label", client="client")),
        "pixels": ("fedavg", "cnn", pefll.federation_from_arrays(pixels, y, client)),
        "neighbours": ("knn-per", "mlp", pefll.federation_from_arrays(np.stack([*columns.values()], 1), y, client)),
        "tokens": ("fedavg", "lstm", pefll.federation_from_arrays(texts, y, client, tokens=True)),
    }
    made = []
    for name, (method, model, federation) in kinds.items():
        run = pefll.fit(federation, method, model=model, **small)
        x = federation.x[:16].numpy()
        personal = run.personalize(x, federation.y[:16].numpy())
        path, data = folder / f"{name}.safetensors", folder / f"{name}.npz"
        personal.save(path)
        np.savez(data, x=x)
        made.append(Subject(name, path.read_bytes(), data, x, personal.probabilities(x)))
    return made


# Damages to bytes.


def flip_bits(one: Subject, rng: Rng) -> bytes:
    content = bytearray(one.content)
    for _ in range(int(rng.integers(1, 4))):
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    return bytes(content)


def flip_header_bit(one: Subject, rng: Rng) -> bytes:
    content = bytearray(one.content)
    length = 8 + int.from_bytes(content[:8], "little")
    content[int(rng.integers(length))] ^= 1 << int(rng.integers(8))
    return bytes(content)


def cut(one: Subject, rng: Rng) -> bytes:
    return one.content[: int(rng.integers(len(one.content)))]


def extend(one: Subject, rng: Rng) -> bytes:
    return one.content + rng.bytes(int(rng.integers(1, 64)))


def zero_block(one: Subject, rng: Rng) -> bytes:
    start, size = int(rng.integers(len(one.content))), int(rng.integers(1, 512))
    block = one.content[start : start + size]
    return one.content[:start] + bytes(len(block)) + one.content[start + size :]


def noise_block(one: Subject, rng: Rng) -> bytes:
    start, size = int(rng.integers(len(one.content))), int(rng.integers(1, 512))
    block = one.content[start : start + size]
    return one.content[:start] + rng.bytes(len(block)) + one.content[start + size :]


def swap_blocks(one: Subject, rng: Rng) -> bytes:
    size = int(rng.integers(1, 256))
    first, second = sorted(int(place) for place in rng.integers(0, len(one.content) - size, 2))
    second = max(second, first + size)
    content = one.content
    return (
        content[:first]
        + content[second : second + size]
        + content[first + size : second]
        + content[first : first + size]
        + content[second + size :]
    )


# Damages to what the header says, in a file whose form is right; the hash is that of before.


def packed(header: dict[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))).encode()
    return len(text).to_bytes(8, "little") + text + data


def data_of(one: Subject) -> bytes:
    return one.content[8 + int.from_bytes(one.content[:8], "little") :]


def edit_header(one: Subject, rng: Rng) -> bytes:
    header = one.header
    names = [name for name in header if name != "__metadata__"]
    name = names[int(rng.integers(len(names)))]
    entry = header[name]
    edits: list[Callable[[], Any]] = [
        lambda: entry.update(dtype=pick(rng, ["F64", "I32", "I64", "F16", "U8", "X", 7, None, []])),
        lambda: entry.update(
            shape=pick(rng, [[], [-1], [10**12], [*entry["shape"][::-1], 1], "x", None, [[]], [1] * 50])
        ),
        lambda: entry.update(data_offsets=pick(rng, [[0, 0], [-4, 4], [4, 0], [0, 10**15], "x", None, [0], [0, 1, 2]])),
        lambda: header.update({f"{name}x": header.pop(name)}),
        lambda: header.pop(name),
        lambda: header.update({"more": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        lambda: header.update({name: pick(rng, [None, 3, [], "x", {}])}),
        lambda: header.update(__metadata__=pick(rng, [None, 3, [], "x", {}, {"format": "pt"}])),
        lambda: header["__metadata__"].update(format=pick(rng, [modelfile.UNCHECKED, "", None, 3])),
        lambda: header["__metadata__"].update(sha256=pick(rng, ["0" * 64, "f" * 64, "", None, 5])),
        lambda: header["__metadata__"].pop("sha256"),
        lambda: header["__metadata__"].pop("facts"),
        lambda: header["__metadata__"].update(more="x"),
    ]
    pick(rng, edits)()
    return packed(header, data_of(one))


def edit_facts_stale(one: Subject, rng: Rng) -> bytes:
    header, facts = one.header, one.facts
    if rng.random() < 0.5:
        facts.update(pick(rng, [{"dataset": "other"}, {"num_clients": 99}, {"class_names": [*"xyz"]}]))
        facts.update({"made": float(rng.random())})
    else:
        facts = hostile_facts(one, rng)
    header["__metadata__"]["facts"] = facts if isinstance(facts, str) else json.dumps(facts)
    return packed(header, data_of(one))


def odd_header(one: Subject, rng: Rng) -> bytes:
    length = len(one.content)
    return pick(
        rng,
        [
            packed("[" * int(rng.integers(1, 200_000)), data_of(one)),
            packed('{"a":' * int(rng.integers(1, 50_000)), data_of(one)),
            packed("{}", data_of(one)),
            packed("9" * 10_000, data_of(one)),
            packed('{"__metadata__":{"a":"b"},"__metadata__":{}}', b""),
            (2**63).to_bytes(8, "little") + one.content[8:],
            (length * 2).to_bytes(8, "little") + one.content[8:],
            (1).to_bytes(8, "little") + one.content[8:],
            bytes(8) + one.content[8:],
            b"",
            rng.bytes(int(rng.integers(0, 4096))),
        ],
    )


# What a stranger writes: a hash that is right, and facts or tensors that make no sense.


def hostile_facts(one: Subject, rng: Rng) -> Any:
    facts = one.facts
    deep: Any = []
    for _ in range(int(rng.integers(1, 900))):
        deep = [deep]
    values: dict[str, list[Any]] = {
        "input_shape": [[10**9], [10**9] * 3, [2**70], [-1], [0], [], "x", None, [1.5], [True], {"a": 1}, deep, [[4]]],
        "classes": [0, -1, 10**9, 2**31, 2**70, "3", None, 1.5, [], facts["classes"] + 1, True, deep],
        "model": ["evil:build", "resnet20", "nothing", "", None, 7, ["mlp"], deep, "../x", "os:system"],
        "tokens": [not facts["tokens"], None, 1, "yes", [], deep],
        "normalise": [
            *([[0.5], [0.0]], [[0.5], [-1.0]], [[float("nan")], [1.0]], [[0.5], [1e400]], [[], []], [1, 2], "x", deep),
            *([[0.5] * 7, [0.5] * 7], [[0.5]], True, {"mean": 1}, [["a"], ["b"]], [[10**400], [1]]),
        ],
        "class_names": [["a"], [1, 2, 3], "abc", {"a": 1}, None, 3, deep, [["a"], ["b"], ["c"]], ["a"] * 10**5],
        "feature_names": [["a"], ["a"] * 5, [1, 2, 3, 4, 5], "abcde", None, 5, deep],
        "neighbours": [
            *({}, "x", 3, [], deep, {"count": 3}),
            {"count": -1, "weight": 0.5, "scale": 1.0, "classes": facts["classes"]},
            {"count": 3, "weight": float("nan"), "scale": 1.0, "classes": facts["classes"]},
            {"count": 3, "weight": 7.0, "scale": 1.0, "classes": facts["classes"]},
            {"count": 3, "weight": 0.5, "scale": 0.0, "classes": facts["classes"]},
            {"count": 3, "weight": 0.5, "scale": 1.0, "classes": facts["classes"] + 5},
            *([] if "neighbours" in facts else [{"count": 3, "weight": 0.5, "scale": 1.0, "classes": 3}]),
        ],
        "label_column": [3, None, deep],
        "client_column": [3, None, deep],
    }
    kind = rng.integers(10)
    if kind == 0:
        return pick(rng, ["", "[" * 100_000, "{", "[]", "3", "null", '"x"', "NaN", '{"model": 1}', "9" * 5000])
    if kind == 1:
        needed = ("model", "input_shape", "classes", "normalise", "tokens", "class_names")
        facts.pop(pick(rng, list(needed)))
        return facts
    name = pick(rng, list(values))
    facts[name] = pick(rng, values[name])
    return facts


def hostile_with_hash(one: Subject, rng: Rng) -> bytes:
    facts = hostile_facts(one, rng)
    return modelfile.to_bytes(one.tensors, facts if isinstance(facts, str) else json.dumps(facts))


def hostile_tensors(one: Subject, rng: Rng) -> bytes:
    tensors = one.tensors
    name = pick(rng, list(tensors))
    value = tensors[name]
    floats = value.is_floating_point()
    edits: list[Callable[[], Any]] = [
        lambda: tensors.pop(name),
        lambda: tensors.update({f"{name}x": tensors.pop(name)}),
        lambda: tensors.update(more=torch.zeros(2)),
        lambda: tensors.update({name: value[None].clone()}),
        lambda: tensors.update({name: value.reshape(-1)[:-1].clone()}),
        lambda: tensors.update({name: torch.zeros(0)}),
        lambda: tensors.update({name: torch.zeros(()) if value.dim() else torch.zeros(3)}),
        lambda: tensors.update({name: value.to(torch.int32)}),
        lambda: tensors.update({name: _spoiled(value, rng) if floats else value + 10**6}),
        lambda: tensors.update({name: _spoiled(value, rng) if floats else value - 10**6}),
        lambda: tensors.clear(),
    ]
    pick(rng, edits)()
    return modelfile.to_bytes({key: each.contiguous() for key, each in tensors.items()}, json.dumps(one.facts))


def _spoiled(value: Any, rng: Rng) -> Any:
    value = value.clone()
    value.view(-1)[int(rng.integers(value.numel()))] = pick(rng, [float("nan"), float("inf"), -float("inf")])
    return value


def pick(rng: Rng, choices: list[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


DAMAGES = (
    *(flip_bits, flip_bits, flip_header_bit, cut, extend, zero_block, noise_block, swap_blocks),
    *(edit_header, edit_facts_stale, odd_header, hostile_with_hash, hostile_with_hash, hostile_tensors),
)


# What comes of them.


def by_python(path: Path, one: Subject) -> str:
    """Load a file and predict with it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PersonalModel.load(path)
            same = np.array_equal(model.probabilities(one.x), one.wanted) and model.spec == ModelSpec.from_json(
                one.facts
            )
    except PefllError:
        return "refused"
    except BaseException as error:  # noqa: BLE001 - whatever comes is what is looked for
        return f"tracebacks {type(error).__name__}: {error}"[:300]
    return "accepted_identical" if same else "accepted_silently"


@contextlib.contextmanager
def verbs_made_once() -> Iterator[None]:
    """Keep the command line's verbs, which typer would make anew at every call; that takes most of the time."""
    application = importlib.import_module("pefll.cli.app")
    before = application.app
    application.app = typer.main.get_command(before)
    try:
        yield
    finally:
        application.app = before


def by_command(path: Path, one: Subject) -> str:
    """Give `pefll predict` in this process."""
    said = io.StringIO()
    before, sys.argv = sys.argv, ["pefll", "predict", str(path), "--data", str(one.data)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            command_line()
    except SystemExit as end:
        return _answer(end.code, said.getvalue())
    except BaseException as error:  # noqa: BLE001
        return f"tracebacks {type(error).__name__}: {error}"[:300]
    finally:
        sys.argv = before
    return "tracebacks no end"


def by_process(path: Path, one: Subject) -> str:
    """Give `pefll predict` in a process of its own."""
    words = [sys.executable, "-m", "pefll_command", "predict", str(path), "--data", str(one.data)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return _answer(said.returncode, said.stdout + said.stderr)


def _answer(code: Any, said: str) -> str:
    if "Traceback" in said:
        return f"tracebacks {said[-300:]}"
    if code == 2 and said.startswith("error: ") and said.count("\n") == 1:
        return "refused"
    return "accepted" if not code else f"tracebacks code {code}: {said[-300:]}"


def campaign(count: int, seed: int, processes: int, folder: Path, console: Console | None = None) -> dict[str, Any]:
    """Damage files and count what comes of it.

    Args:
        count: of damages.
        seed: of all that is random.
        processes: how many of them are also given to a process of their own.
        folder: for files.
        console: shows progress.
    """
    rng, whole, path = np.random.default_rng(seed), subjects(folder), folder / "damaged.safetensors"
    for one in whole:  # else nothing would be shown by the rest
        path.write_bytes(one.content)
        assert (by_python(path, one), by_command(path, one)) == ("accepted_identical", "accepted"), one.name
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    kinds: dict[str, Counter[str]] = {}
    found: list[str] = []
    real = set(np.linspace(0, count - 1, processes, dtype=int).tolist()) if processes else set()
    with monitor(console, "damaging", count) as watch, verbs_made_once():
        for number in range(count):
            # The tokens' file is the largest by far.
            one = whole[int(rng.integers(3)) if rng.random() < 0.95 else 3]
            damage = DAMAGES[number % len(DAMAGES)]
            content = damage(one, rng)
            while content == one.content:  # a block of zeros that were there, or two of the same
                content = damage(one, rng)
            path.write_bytes(content)
            answers = [by_python(path, one), by_command(path, one)]
            answers += [by_process(path, one)] if number in real else []
            outcome = _worst(answers)
            counts[outcome] += 1
            kinds.setdefault(damage.__name__, Counter())[outcome] += 1
            if outcome != "refused":
                found.append(f"{one.name} {damage.__name__} {number}: {answers}")
            watch.at(number + 1, f"{counts['tracebacks']} tracebacks, {counts['accepted_silently']} accepted silently")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    return {
        "tried": count,
        **counts,
        "of_these_in_processes_of_their_own": len(real),
        "peak_memory_grew_by_megabytes": round(grown / 1024),
        "seed": seed,
        "by_damage": {name: dict(each) for name, each in sorted(kinds.items())},
        "not_refused": found[:20],
    }


def _worst(answers: list[str]) -> str:
    """Return what a damage came to: the command line and Python must agree."""
    if any(answer.startswith("tracebacks") for answer in answers):
        return "tracebacks"
    if all(answer == "refused" for answer in answers):
        return "refused"
    return answers[0] if answers[0] != "refused" else "accepted_silently"


def main() -> None:
    """Run the campaign and keep its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="how many damages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=20, help="how many are also given to a process of their own")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = campaign(given.count, given.seed, given.processes, Path(folder), Console(stderr=True))
    command = shlex.join(["python", "-m", "tests.faults.personal_models", *sys.argv[1:]])
    record(given.out, "damaged personal models", command, figures)
    print(json.dumps({name: figures[name] for name in ("tried", *OUTCOMES)}))
    for line in figures["not_refused"]:
        print(line)
    os._exit(1 if figures["accepted_silently"] or figures["tracebacks"] else 0)


if __name__ == "__main__":
    main()
