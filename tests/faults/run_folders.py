"""Damage run folders at random, and see that every reader refuses, recovers with a note, or is right.

    python -m tests.faults.run_folders --count 10000 --out results/faults.json

Each time a finished or an unfinished run is copied and damaged. `pefll.load` and what `pefll show` reads come in this
process, the verbs of the command line too, since a process costs seconds; some come as real commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.progress import track
from safetensors.torch import load_file

import pefll
from pefll import cli
from pefll.core.errors import PefllError
from pefll.report.descriptors import read_descriptors
from pefll.report.runs import read_run
from pefll.runs import checkpoint
from pefll.runs.record import RunFolder
from tests.faults.damages import DAMAGES
from tests.faults.record import FILE, record
from tests.federations import flat

ROUNDS = 5
TRAIN = (
    f"--rounds {ROUNDS} --model tiny --clients-per-round 2 --eval-every 1 --checkpoint-every 2 --engine serial "
    "--processes 1 --device cpu --unseen 0.25 --set embedding=linear --set hypernetwork=S --set local_steps=1"
).split()
NOTES = (
    "damaged",
    "skipped",
    "kept as",
    "restored",
    "earlier version",
    "anew",
    "start the run again",
    "another run",
    "is missing",
)


def main_of(*arguments: object) -> int:
    """Run a verb of the command line in this process, and return its exit code."""
    before, sys.argv = sys.argv, ["pefll", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


@contextmanager
def heard() -> Iterator[io.StringIO]:
    """Catch what verbs say in this process."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        yield said


class PowerCutError(Exception):
    """Ends a run as a kill would."""


@dataclass(frozen=True)
class Base:
    """Runs to be damaged.

    Attributes:
        home: their folder.
        finished: of ROUNDS rounds.
        unfinished: the same, killed while round 5 was being recorded: evaluations until 4, checkpoints of 2 and 4.
        other: finished, with another seed.
        client: samples of a new client.
    """

    home: Path

    finished: Path = field(init=False)
    unfinished: Path = field(init=False)
    other: Path = field(init=False)
    client: Path = field(init=False)

    def __post_init__(self) -> None:
        for name in ("finished", "unfinished", "other"):
            object.__setattr__(self, name, self.home / name)
        object.__setattr__(self, "client", self.home / "client.npz")


def prepare(home: Path) -> Base:
    """Train the runs that are damaged."""
    rng, base = np.random.default_rng(0), Base(home)
    y = rng.integers(0, 3, 240)
    x = (rng.normal(size=(3, 6))[y] + rng.normal(size=(240, 6))).astype(np.float32)
    np.savez(home / "data.npz", x=x, y=y, client=np.arange(240) % 8)
    np.savez(base.client, x=x[:20], y=y[:20])
    data = ("--data", home / "data.npz")
    append = RunFolder.append_history

    def cut(folder: RunFolder, row: dict[str, Any]) -> None:
        if row["round"] == ROUNDS:
            raise PowerCutError
        append(folder, row)

    with heard():
        assert main_of("train", *TRAIN, *data, "--out", base.finished) == 0
        assert main_of("train", *TRAIN, *data, "--seed", 1, "--out", base.other) == 0
        RunFolder.append_history = cut  # type: ignore[method-assign]
        try:
            main_of("train", *TRAIN, *data, "--out", base.unfinished)
        except PowerCutError:
            pass
        finally:
            RunFolder.append_history = append  # type: ignore[method-assign]
    assert [row["round"] for row in RunFolder(base.unfinished).history()] == [1, 2, 3, 4]
    return base


@dataclass(frozen=True)
class Seen:
    """What a reader came to: a value and notes, or a refusal, or a traceback."""

    value: Any = None
    notes: tuple[str, ...] = ()
    refused: str = ""
    fault: str = ""


def observe(reader: Callable[[Path], tuple[Any, list[str]]], folder: Path) -> Seen:
    try:
        value, notes = reader(folder)
    except PefllError as error:
        return Seen(refused=str(error))
    except Exception:  # noqa: BLE001 (counted)
        return Seen(fault=traceback.format_exc())
    return Seen(value, tuple(note.replace(str(folder), "RUN") for note in notes))


def load(folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = pefll.load(folder)
    states = [flat(state).numpy().tobytes() for state in (run.server, run.final)]
    return (states, json.dumps(run.summary), dataclasses.asdict(run.config)), [str(one.message) for one in caught]


def show(folder: Path) -> tuple[Any, list[str]]:
    """Read everything that `pefll show` and `pefll results add` show, without pictures."""
    run = read_run(RunFolder(folder))
    described = os.path.lexists(run.folder.descriptors_file)
    found = vars(read_descriptors(run.folder)).values() if described else ()
    rest = [np.asarray(value).tobytes() for value in found]
    notes = [*filter(None, [run.folder.note_of_age()]), *([] if run.finished else ["it is not finished"])]
    return (json.dumps([run.config, run.summary], sort_keys=True), rest, run.history), notes


def resume(folder: Path) -> tuple[Any, list[str]]:
    """Go on until the end, and return all that the run came to."""
    notes = _verb("train", "--resume", folder)
    saved = checkpoint.latest(folder / "checkpoints", lambda sentence: None)
    digest = hashlib.sha256()
    for name in sorted(saved.tensors):
        digest.update(name.encode() + saved.tensors[name].numpy().tobytes())
    run = read_run(RunFolder(folder))
    assert run.summary is not None
    rows = [{key: row[key] for key in row if key != "seconds"} for row in run.history]
    return (saved.round, digest.hexdigest(), rows, run.summary["accuracy"], run.summary["best_round"]), notes


def _verb(*arguments: object) -> list[str]:
    """Run a verb; return its notes, or raise PefllError where it refuses."""
    with heard() as said:
        code = main_of(*arguments)
    lines = said.getvalue().splitlines()
    if code == 2 and lines and lines[-1].startswith("error: "):
        raise PefllError(lines[-1])
    if code:
        raise RuntimeError(f"exit code {code}: {lines}")
    return [line for line in lines if any(word in line for word in NOTES)]


def evaluate_verb(folder: Path) -> tuple[Any, list[str]]:
    return None, _verb("evaluate", folder)


def personalize_verb(folder: Path) -> tuple[Any, list[str]]:
    made = folder.parent / "personal.safetensors"
    notes = _verb("personalize", folder, "--data", folder.parent / "client.npz", "--out", made, "--force")
    # The order of names in the file's header is left to chance.
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(made).items()}, notes


def judge(reader: Callable[..., Any], seen: Seen, wanted: Seen) -> str:
    """Return what a reader did: fault, refused, noted, same, after_kill, or silent."""
    if seen.fault:
        return "fault"
    if seen.refused:
        return "refused"
    same_value = seen.value == wanted.value
    if reader is resume:  # whatever was said, the run must end as it would have
        return "silent" if not same_value else "same" if seen.notes == wanted.notes else "noted"
    if seen.notes != wanted.notes:
        return "noted"
    if same_value:
        return "same"
    if reader is show and "it is not finished" in seen.notes and seen.value[:2] == wanted.value[:2]:
        rows, all_rows = seen.value[2], wanted.value[2]  # newer than the last checkpoint: as a power cut leaves them
        return "after_kill" if rows == all_rows[: len(rows)] else "silent"
    return "silent"


def lost_rows(before: bytes, folder: Path, seen: Seen) -> int:
    """Return how many evaluations are nowhere after a run was resumed; a refusal must leave all as it was."""
    if seen.fault:
        return 0
    if not seen.refused:
        rounds = {row["round"] for row in RunFolder(folder).history()}
        return len(set(range(1, ROUNDS + 1)) - rounds)
    kept = [path.read_bytes() for path in folder.glob("history.jsonl*") if path.is_file()]
    return 0 if not before or before in kept else before.count(b"\n") or 1


def campaign(base: Base, count: int, seed: int, resumed: float, progress: bool = False) -> dict[str, Any]:
    """Damage folders `count` times and return the counts."""
    rng, counts, by_kind, examples = Random(seed), Counter[str](), Counter[str](), []
    originals = (base.finished, base.unfinished)
    readers = (load, show, evaluate_verb, personalize_verb, resume)
    wanted = {}
    for original in originals:
        for reader in readers:
            copied = fresh(base, original)
            wanted[original, reader] = observe(reader, copied)
            assert not wanted[original, reader].fault, wanted[original, reader].fault
            assert not wanted[original, reader].refused
    for number in track(range(count), "damaged run folders", disable=not progress):
        if progress and not sys.stdout.isatty() and number % 200 == 0:
            print(f"{number} of {count}: {dict(counts)}", *examples[-3:], flush=True)
        original, damage = rng.choice(originals), rng.choice(DAMAGES)
        folder = fresh(base, original)
        place = damage(rng, folder, base.other)
        history = folder / "history.jsonl"
        before = history.read_bytes() if history.is_file() else b""
        chosen = [show, load] if rng.random() < 0.5 else [load, show]
        chosen += [evaluate_verb, personalize_verb] if number % 50 == 0 else []
        chosen += [resume] if rng.random() < resumed else []
        verdicts = []
        for reader in chosen:
            seen = observe(reader, folder)
            verdict = judge(reader, seen, wanted[original, reader])
            verdicts.append(verdict)
            counts[f"by_{reader.__name__}.{verdict}"] += 1
            if reader is resume:
                counts["rows_lost"] += lost_rows(before, folder, seen)
            if verdict in ("fault", "silent"):
                examples.append(
                    f"{original.name} {damage.__name__} {place} {reader.__name__}: {verdict} {seen.fault[-1500:]}"
                )
        order = ("fault", "silent", "refused", "noted", "after_kill", "same")
        counts[next(verdict for verdict in order if verdict in verdicts)] += 1
        by_kind[damage.__name__] += 1
    return {"counts": counts, "by_kind": by_kind, "examples": examples}


def fresh(base: Base, original: Path) -> Path:
    folder = base.home / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    return folder


def real_commands(base: Base, count: int, seed: int, progress: bool = False) -> dict[str, int]:
    """Damage folders and run real commands on them; return how they ended."""
    rng, counts = Random(seed), Counter[str]()
    for _ in track(range(count), "real commands", disable=not progress):
        folder = fresh(base, rng.choice((base.finished, base.unfinished)))
        damage = rng.choice(DAMAGES)
        place = damage(rng, folder, base.other)
        made = base.home / "personal.safetensors"
        verbs = (
            ["train", "--resume", folder],
            ["show", folder, "--out", base.home / "pictures"],
            ["evaluate", folder],
            ["results", "add", folder, "--to", base.home / "results"],
            ["personalize", folder, "--data", base.client, "--out", made, "--force"],
        )
        command = [sys.executable, "-m", "pefll", *map(str, rng.choice(verbs))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        fine = done.returncode in (0, 2) and "Traceback" not in done.stderr
        counts["refused" if done.returncode == 2 else "went_on" if fine else "fault"] += 1
        if not fine:
            print(damage.__name__, place, command, done.stderr[-2000:], sep="\n")
    return dict(counts)


def figures(result: dict[str, Any], resumed: float) -> dict[str, Any]:
    """Return counts under the names that all campaigns share."""
    counts = result["counts"]
    return {
        "tried": sum(result["by_kind"].values()),
        "refused": counts["refused"],
        "noted_and_recovered": counts["noted"],
        "harmless": counts["same"],
        "as_a_power_cut_leaves_it": counts["after_kill"],
        "accepted_silently": counts["silent"],
        "tracebacks": counts["fault"],
        "rows_lost": counts["rows_lost"],
        "resumed_to_the_end": sum(number for name, number in counts.items() if name.startswith("by_resume.")),
        "share_resumed": resumed,
        "by_damage": dict(sorted(result["by_kind"].items())),
        "by_reader": {name[3:]: number for name, number in sorted(counts.items()) if name.startswith("by_")},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--resumed", type=float, default=0.2, help="share of folders whose run is resumed to its end")
    options.add_argument("--commands", type=int, default=20, help="how many real commands besides")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=FILE)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as home:
        base = prepare(Path(home))
        result = campaign(base, asked.count, asked.seed, asked.resumed, progress=True)
        found = figures(result, asked.resumed)
        found["real_commands"] = real_commands(base, asked.commands, asked.seed, progress=True)
    for example in result["examples"][:20]:
        print(example)
    command = f"python -m tests.faults.run_folders --count {asked.count} --resumed {asked.resumed} --seed {asked.seed}"
    record(asked.out, "run folders", command, found)
    print(json.dumps(found, indent=2))
    bad = found["accepted_silently"] + found["tracebacks"] + found["rows_lost"] + found["real_commands"].get("fault", 0)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
