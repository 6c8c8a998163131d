"""Random damages to a run's folder, as disks, tools and people do them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from pefll.runs.checksums import digest

Damage = Callable[[Random, Path, Path], str]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _some_file(rng: Random, folder: Path, least: int = 0) -> Path:
    found = [path for path in files_of(folder) if path.stat().st_size >= least]
    # Small files matter as much as large ones, and text more than events.
    return rng.choice([path for path in found if "tfevents" not in path.name] if rng.random() < 0.95 else found)


def _change(path: Path, change: Callable[[bytearray], None]) -> str:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path.name


def flip_bit(rng: Random, folder: Path, other: Path) -> str:
    def change(content: bytearray) -> None:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)

    return _change(_some_file(rng, folder, 1), change)


def truncate(rng: Random, folder: Path, other: Path) -> str:
    path = _some_file(rng, folder, 1)
    os.truncate(path, rng.randrange(path.stat().st_size))
    return path.name


def extend(rng: Random, folder: Path, other: Path) -> str:
    return _change(_some_file(rng, folder), lambda content: content.extend(rng.randbytes(rng.randint(1, 64))))


def zero_block(rng: Random, folder: Path, other: Path) -> str:
    def change(content: bytearray) -> None:
        start, size = rng.randrange(len(content)), rng.choice((1, 16, 512, 4096))
        content[start : start + size] = bytes(len(content[start : start + size]))

    return _change(_some_file(rng, folder, 1), change)


def bad_byte(rng: Random, folder: Path, other: Path) -> str:
    """Put a byte that is no UTF-8 into a file of text."""
    texts = [path for path in files_of(folder) if path.suffix in (".json", ".jsonl", ".toml") and path.stat().st_size]
    return _change(
        rng.choice(texts), lambda content: content.insert(rng.randrange(len(content)), rng.choice(b"\xff\xfe\x80"))
    )


def deep_json(rng: Random, folder: Path, other: Path) -> str:
    texts = [path for path in files_of(folder) if path.suffix in (".json", ".jsonl", ".toml")]
    path = rng.choice(texts)
    path.write_bytes((b"a = " if path.suffix == ".toml" else b"") + b"[" * rng.choice((1000, 100_000)) + b"\n")
    return path.name


def empty(rng: Random, folder: Path, other: Path) -> str:
    path = _some_file(rng, folder, 1)
    path.write_bytes(b"")
    return path.name


def delete(rng: Random, folder: Path, other: Path) -> str:
    path = _some_file(rng, folder)
    path.unlink()
    return path.name


def delete_folder(rng: Random, folder: Path, other: Path) -> str:
    places = [*(folder / "checkpoints").iterdir(), folder / "checkpoints"]
    path = rng.choice(places)
    shutil.rmtree(path)
    return path.name


def folder_in_place(rng: Random, folder: Path, other: Path) -> str:
    path = _some_file(rng, folder)
    path.unlink()
    path.mkdir()
    return path.name


def link_in_place(rng: Random, folder: Path, other: Path) -> str:
    path = _some_file(rng, folder)
    path.unlink()
    path.symlink_to(folder / "nowhere")
    return path.name


def swap_checkpoints(rng: Random, folder: Path, other: Path) -> str:
    one, two = sorted((folder / "checkpoints").iterdir())
    aside = folder / "aside"
    one.rename(aside), two.rename(one), aside.rename(two)
    return "checkpoints"


def rename_checkpoint(rng: Random, folder: Path, other: Path) -> str:
    path = rng.choice(sorted((folder / "checkpoints").iterdir()))
    new = path.with_name(f"round-{rng.randrange(1, 20):08d}")
    path.rename(path.with_name("elsewhere") if new.exists() else new)
    return path.name


def copy_older_over_newer(rng: Random, folder: Path, other: Path) -> str:
    """A file of the newest checkpoint as it was in the one before."""
    older, newer = sorted((folder / "checkpoints").iterdir())
    name = rng.choice(sorted(os.listdir(older)))
    shutil.copy(older / name, newer / name)
    return name


def exchange_file(rng: Random, folder: Path, other: Path) -> str:
    """A file of another run in place of the run's own."""
    shared = [path for path in files_of(folder) if (other / path.relative_to(folder)).is_file()]
    path = rng.choice([path for path in shared if path.stat().st_size])
    shutil.copy(other / path.relative_to(folder), path)
    return path.name


def exchange_checkpoint(rng: Random, folder: Path, other: Path) -> str:
    paths = [path for path in (folder / "checkpoints").iterdir() if (other / "checkpoints" / path.name).is_dir()]
    path = rng.choice(sorted(paths))
    shutil.rmtree(path)
    shutil.copytree(other / "checkpoints" / path.name, path)
    return path.name


def edit_value(rng: Random, folder: Path, other: Path) -> str:
    """Change a number or a word as an editor would."""
    texts = [path for path in files_of(folder) if path.suffix in (".json", ".jsonl", ".toml") and path.stat().st_size]
    top = [path for path in texts if path.parent == folder]
    path = rng.choice(top if rng.random() < 0.7 else texts)
    text = path.read_text()
    places = list(re.finditer(r"-?\b\d+(\.\d+)?\b|\btrue\b|\"[a-z_]+\"", text))
    place = rng.choice(places)
    found = place[0]
    if found == "true":
        new = "false"
    elif found.startswith('"'):
        new = f'"{found[1:-1]}x"'
    else:
        new = str(rng.choice((int(float(found)) + 1, -1, 0, 10**12))) + (".5" if "." in found else "")
    path.write_text(text[: place.start()] + new + text[place.end() :])
    return path.name


def edit_lines(rng: Random, folder: Path, other: Path) -> str:
    """Delete, repeat or exchange lines of the history or of the settings."""
    path = folder / rng.choice(("history.jsonl", "history.jsonl", "config.toml"))
    lines = path.read_bytes().splitlines(keepends=True)
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.choice(("delete", "repeat", "exchange"))
    if how == "delete":
        del lines[one]
    elif how == "repeat":
        lines.insert(two, lines[one])
    else:
        lines[one], lines[two] = lines[two], lines[one]
    path.write_bytes(b"".join(lines))
    return path.name


# What a stranger may put into a manifest, which gets the right SHA-256 then.
HOSTILE: tuple[tuple[str, Any], ...] = (
    *(("round", value) for value in (float("inf"), -1, 5.5, True, "5", None, 10**400)),
    *(("files", value) for value in (5, [], {}, {"../config.toml": {"bytes": 1, "sha256": ""}}, {"/etc/passwd": {}})),
    *(("files/state.safetensors", value) for value in (5, {}, {"bytes": "1", "sha256": 2}, {"bytes": float("inf")})),
    *(("facts", value) for value in (5, {}, [])),
    *(("facts/run", value) for value in (5, [], {"config": 5}, {"id": []}, {"config": "= ["}, None)),
    *(("facts/run/config", value) for value in ("no TOML", "a = " + "[" * 9999, 7)),
    *(("facts/problem", value) for value in (5, {}, None)),
    *(("facts/problem/input_shape", value) for value in ([10**9], [], 6, [-1], [float("nan")], [10**30])),
    *(("facts/problem/classes", value) for value in (10**9, 0, "3", float("inf"))),
    *(("facts/problem/model", value) for value in (5, "lstm", "os:system", "no", "lenet", "resnet20")),
    *(("facts/problem/normalise", value) for value in (5, [[0], [0]], [1])),
    *(("facts/problem/num_clients", value) for value in (-1, "8", None, float("nan"))),
    *(("facts/problem/probe", value) for value in (5, [[]], [["a"], [1]], [[10**400], [1.0]])),
    *(("facts/progress", value) for value in (5, {}, None)),
    *(("facts/progress/best_round", value) for value in ({}, "1", float("inf"), -3)),
    *(("facts/progress/train_seconds", value) for value in ("1", None, float("nan"))),
    *(("facts/progress/engines", value) for value in (5, [5], [["serial"]], [[1, 2]])),
    *(("facts/progress/ledger", value) for value in (5, {"add": 1}, {"up": "1"})),
    *(("facts/progress/unknown", value) for value in (5,)),
    *(("facts/scheduled", value) for value in (5, {"round": 1}, {"round": "1", "value": []})),
)


def put(manifest: Path, where: str, value: Any) -> None:
    """Put a value into a manifest, and give it the SHA-256 that it has then."""
    content = json.loads(manifest.read_text())
    del content["sha256"]
    *above, name = where.split("/")
    inner = content
    for each in above:
        inner = inner[each]
    inner[name] = value
    manifest.write_text(json.dumps(content | {"sha256": digest(content)}))


def hostile_manifest(rng: Random, folder: Path, other: Path) -> str:
    """Give one manifest, or all, a value that makes no sense, with the right SHA-256."""
    found = sorted((folder / "checkpoints").glob("*/manifest.json"))
    where, value = rng.choice(HOSTILE)
    for manifest in rng.choice((found, found[-1:])):
        put(manifest, where, value)
    return f"{where} = {value!r}"[:80]


DAMAGES: tuple[Damage, ...] = (
    *(flip_bit, flip_bit, flip_bit, truncate, truncate, extend, zero_block, bad_byte, deep_json, empty, delete),
    *(delete_folder, folder_in_place, link_in_place, swap_checkpoints, rename_checkpoint, copy_older_over_newer),
    *(exchange_file, exchange_file, exchange_checkpoint, edit_value, edit_value, edit_value, edit_lines, edit_lines),
    *(hostile_manifest, hostile_manifest, hostile_manifest),
)
