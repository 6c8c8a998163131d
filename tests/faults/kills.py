"""Kill `pefll train` again and again, go on each time, and see that the run ends as if nothing had happened.

    python -m tests.faults.kills --count 500 --out results/faults.json

A process that has imported everything forks a child for each attempt, since a process of its own costs seconds. Half
of the children are killed at a random time. The others are killed just before or after a random file operation, so
that many kills come while a checkpoint, the history or the summary is being written. Some kills hit real commands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import Progress

from pefll.core.files import is_temporary
from pefll.runs import checkpoint
from pefll.runs.record import RunFolder
from tests.faults.record import FILE, record
from tests.faults.run_folders import TRAIN, main_of, prepare

ROUNDS = 6
OPTIONS = [*TRAIN, "--rounds", str(ROUNDS), "--checkpoint-every", "1", "--seed", "5"]
OPERATIONS = ("fsync", "replace", "rename", "mkdir", "unlink", "open", "rmdir")
SECONDS = 300.0  # after which an attempt counts as hung


def words_for(data: Path, folder: Path) -> list[str]:
    """Return the command that begins a run, or goes on with it."""
    if (folder / "config.toml").exists():
        return ["train", "--resume", str(folder)]
    return ["train", *OPTIONS, "--data", str(data), "--out", str(folder)]


def start(words: list[str], log: Path, killed_at: int = 0, after: bool = False) -> int:
    """Fork a child that runs a verb, and return its process id.

    Args:
        words: the verb and its arguments.
        log: gets what the child says.
        killed_at: the number of the file operation at which it kills itself; 0 for none.
        after: kill just after that operation, else just before it.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if killed_at:
            _kill_at_operation(killed_at, after)
        code = main_of(*words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 (it is looked for in the log)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _kill_at_operation(number: int, after: bool) -> None:
    """Let this process kill itself at a file operation that changes something."""
    left = [number]

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(getattr(os, name)))


def wait(child: int, seconds: float | None) -> int:
    """Wait for a child, kill it after some seconds, and return its exit code; -9 for one that was killed."""
    end = time.monotonic() + (SECONDS if seconds is None else seconds)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    if seconds is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise TimeoutError(f"a run that should go on hangs for {SECONDS} seconds")
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def outcome(folder: Path) -> Any:
    """Return everything that a run came to but its times."""
    saved = checkpoint.latest(folder / "checkpoints", lambda sentence: None, RunFolder(folder).run_id())
    digest = hashlib.sha256()
    for name in sorted(saved.tensors):
        digest.update(name.encode() + saved.tensors[name].numpy().tobytes())
    rows = [{key: row[key] for key in row if key != "seconds"} for row in RunFolder(folder).history()]
    summary = RunFolder(folder).summary() or {}
    kept = {key: summary.get(key) for key in ("accuracy", "best_round", "rounds", "bytes_down", "bytes_up", "settings")}
    return saved.round, digest.hexdigest(), rows, kept


def left_over(folder: Path) -> list[str]:
    """Return what no finished run has: half-written files, and what was taken for damaged."""
    names = [path.name for path in folder.rglob("*")]
    return [name for name in names if is_temporary(name) or name.startswith(".building-") or "damaged" in name]


class Campaign:
    """Kills runs until so many kills are reached, and counts."""

    def __init__(self, home: Path, seed: int) -> None:
        base = prepare(home)  # warms this process up, too
        self.home, self.data, self.rng = home, home / "data.npz", Random(seed)
        self.counts, self.log, self.examples = Counter[str](), home / "log", list[str]()
        whole, began = home / "whole", time.monotonic()
        assert wait(start(words_for(self.data, whole), self.log), None) == 0, self.log.read_text()
        self.seconds = time.monotonic() - began
        self.wanted = outcome(whole)
        assert base.finished.is_dir()

    def chain(self, count: int, told: Callable[[], None]) -> None:
        """Kill one run at most `count` times, and let it end."""
        folder = self.home / f"run-{self.counts['chains']}"
        self.log.unlink(missing_ok=True)
        for _ in range(min(count, self.rng.choice((1, 2, 4, 8, 16)))):
            words = words_for(self.data, folder)
            self.counts["tries"] += 1
            if self.rng.random() < 0.5:
                child = start(words, self.log)
                code = wait(child, self.rng.uniform(0, self.seconds))
                kind = "at_a_random_time"
            else:
                child = start(words, self.log, self.rng.randint(1, 120), self.rng.random() < 0.5)
                code = wait(child, None)
                kind = "at_a_file_operation"
            if code == -signal.SIGKILL:
                self.counts[kind] += 1
                told()
            else:
                break
        code = wait(start(words_for(self.data, folder), self.log), None)
        self._check(folder, code)

    def command(self, longest: float) -> None:
        """Kill one real command, and let the run end."""
        folder = self.home / f"command-{self.counts['real_commands']}"
        self.log.unlink(missing_ok=True)
        words = [sys.executable, "-m", "pefll", *words_for(self.data, folder)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(self.rng.uniform(0, longest))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.counts["real_commands"] += 1
        self.counts["real_commands_killed"] += process.returncode == -signal.SIGKILL
        code = wait(start(words_for(self.data, folder), self.log), None)
        self._check(folder, code)

    def _check(self, folder: Path, code: int) -> None:
        self.counts["chains"] += 1
        said = self.log.read_text(errors="replace")
        different = code != 0 or outcome(folder) != self.wanted
        leftovers = left_over(folder) if folder.is_dir() else []
        self.counts["different_in_the_end"] += different
        self.counts["tracebacks"] += said.count("Traceback")
        self.counts["left_over"] += len(leftovers)
        self.counts["taken_for_damage"] += "damaged" in said
        if different or "Traceback" in said or leftovers or "damaged" in said:
            self.examples.append(f"{folder.name}, exit code {code}, left over {leftovers}: {said[-3000:]}")


def campaign(
    home: Path, count: int, commands: int, seed: int, progress: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Kill `count` times and return the figures, and what went wrong."""
    torch.set_num_threads(1)  # threads do not survive a fork
    kills = Campaign(home, seed)
    with Progress(disable=not progress) as bar:
        line = bar.add_task("kills", total=count)
        while (left := count - kills.counts["at_a_random_time"] - kills.counts["at_a_file_operation"]) > 0:
            kills.chain(left, lambda: bar.advance(line))
        line = bar.add_task("real commands", total=commands)
        for _ in range(commands):
            kills.command(12.0)
            bar.advance(line)
    counts = kills.counts
    return {
        "tried": counts["at_a_random_time"] + counts["at_a_file_operation"] + counts["real_commands_killed"],
        "at_a_random_time": counts["at_a_random_time"],
        "at_a_file_operation": counts["at_a_file_operation"],
        "real_commands": counts["real_commands"],
        "real_commands_killed": counts["real_commands_killed"],
        "runs_ended": counts["chains"],
        "different_in_the_end": counts["different_in_the_end"],
        "accepted_silently": counts["different_in_the_end"],
        "tracebacks": counts["tracebacks"],
        "left_over": counts["left_over"],
        "taken_for_damage": counts["taken_for_damage"],
    }, kills.examples


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=10)
    options.add_argument("--commands", type=int, default=20, help="how many real commands are killed besides")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=FILE)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as home:
        found, examples = campaign(Path(home), asked.count, asked.commands, asked.seed, progress=True)
    for example in examples[:10]:
        print(example)
    command = f"python -m tests.faults.kills --count {asked.count} --commands {asked.commands} --seed {asked.seed}"
    record(asked.out, "kills", command, found)
    print(json.dumps(found, indent=2))
    bad = ("different_in_the_end", "tracebacks", "left_over", "taken_for_damage")
    sys.exit(1 if any(found[name] for name in bad) else 0)


if __name__ == "__main__":
    main()
