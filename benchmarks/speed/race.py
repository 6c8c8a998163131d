"""Runs one race: all contenders are processes that take turns, so that other work on the machine slows all of them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.speed.contender import INSTALL, Contender
from benchmarks.speed.processes import memory_bytes
from benchmarks.speed.setting import DATA_VARIABLE, Setting

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.05  # time between measurements of memory, in the turn that is not timed
MOST_ROUNDS = 2_000
RATES = {"steps_per_second": "seconds", "steps_per_cpu_second": "cpu_seconds"}
REFERENCES = ("plain", "pfl")
MOST_WAIT = 600.0  # time limit of one turn in seconds

Turn = dict[str, float]
Row = dict[str, Any]


class Failed(Exception):
    """A contender ended before its race did; the text says why."""


class Runner:
    """A contender's process.

    Args:
        contender: the contender.
        setting: setting of the race.
        data_dir: folder that may contain CIFAR-10.
        root: folder of the checkout whose code it runs.
    """

    def __init__(self, contender: Contender, setting: Setting, data_dir: Path | None, root: Path = ROOT) -> None:
        what = {
            "contender": dataclasses.asdict(contender),
            "setting": setting.plain(),
            "data_dir": str(data_dir) if data_dir else None,
        }
        # One thread, set before any library reads it; contenders that may use more set it themselves.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment[DATA_VARIABLE] = str(data_dir or "")
        self.contender = contender
        self.peak_bytes = 0
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.speed.child", json.dumps(what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=root,
            env=environment,
            text=True,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    @property
    def _stdout(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def turn(self, rounds: int) -> Turn:
        """Make the contender do some rounds, and return its answer; with 0 rounds it answers and ends."""
        self.ask(rounds)
        return self.answer()

    def ask(self, rounds: int) -> None:
        """Tell the contender to do some rounds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{rounds}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed() from error

    def answer(self, meanwhile: Callable[[], None] | None = None) -> Turn:
        """Wait for the rounds, and return the contender's answer.

        Args:
            meanwhile: function that is called repeatedly while waiting; it may slow the contender a little.
        """
        waited, pause = 0.0, 1.0 if meanwhile is None else SAMPLE_SECONDS
        while not self._selector.select(pause):
            waited += pause
            if waited > MOST_WAIT:
                raise Failed(f"no answer for {MOST_WAIT:.0f} seconds")
            if meanwhile is not None:
                meanwhile()
        line = self._stdout.readline()
        if not line:
            raise self._failed()
        answer: Turn = json.loads(line)
        return answer

    def look_at_memory(self) -> None:
        """Measure the memory of the process and its descendants, and keep the maximum."""
        self.peak_bytes = max(self.peak_bytes, memory_bytes(self._process.pid))

    def close(self) -> None:
        """End the process, if it still runs."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # the process may end before it reads the line
                    pipe.close()
        self._wait()
        self._log.close()

    def _wait(self) -> None:
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failed(self) -> Failed:
        self._wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return Failed(lines[-1][:200] if lines else f"ended with status {self._process.returncode}")


def race(
    setting: Setting,
    contenders: Sequence[Contender],
    turns: int,
    turn_seconds: float,
    data_dir: Path | None = None,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Return a row for every contender.

    Args:
        setting: setting of all contenders.
        contenders: programs that take part.
        turns: number of timed turns of each contender.
        turn_seconds: time of a turn; it has as many rounds as fit, and at least one.
        data_dir: folder that may contain CIFAR-10.
        tick: function that gets the name of the next contender; called 4 + turns times for each contender.
    """
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    rounds: dict[str, int] = {}
    timed: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}

    def attempt(contender: Contender, what: Callable[[], None]) -> None:
        tick(contender.name)
        if contender.name in rows:  # it is not installed, or has failed before
            return
        try:
            what()
        except Failed as failure:
            rows[contender.name] = row_of(contender, setting) | {"error": str(failure)}

    def appear(contender: Contender) -> None:
        # No waiting yet: all contenders load libraries and data, and compile, at the same time.
        runners[contender.name] = Runner(contender, setting, data_dir)
        runners[contender.name].ask(1)

    def watch() -> None:
        for runner in runners.values():
            runner.look_at_memory()

    def start(contender: Contender) -> None:
        runners[contender.name].answer(meanwhile=watch)

    def pace(contender: Contender) -> None:
        seconds = runners[contender.name].turn(1)["seconds"]
        rounds[contender.name] = max(1, min(MOST_ROUNDS, math.ceil(turn_seconds / max(seconds, 1e-6))))

    def take_turn(contender: Contender) -> None:
        timed[contender.name].append(runners[contender.name].turn(rounds[contender.name]))

    def end(contender: Contender) -> None:
        runner = runners[contender.name]
        last: dict[str, Any] = dict(runner.turn(0))
        peak = max(runner.peak_bytes, int(last["own_peak_bytes"]))
        rows[contender.name] = row_of(contender, setting) | {
            "turns": timed[contender.name],
            "peak_bytes": peak,
            "gpu_peak_bytes": last["gpu_peak_bytes"],
            "finite": last["finite"],
        }

    for contender in contenders:
        if contender.missing:
            rows[contender.name] = row_of(contender, setting) | {"error": INSTALL}
    try:
        for phase in (appear, start, pace):
            for contender in contenders:
                attempt(contender, lambda phase=phase, contender=contender: phase(contender))  # type: ignore[misc]
        for turn in range(turns):
            # The order changes with each turn: caches and clock rates depend on the contender before.
            first = turn % max(1, len(contenders))
            for contender in [*contenders[first:], *contenders[:first]]:
                attempt(contender, lambda contender=contender: take_turn(contender))  # type: ignore[misc]
        for contender in contenders:
            attempt(contender, lambda contender=contender: end(contender))  # type: ignore[misc]
    finally:
        for runner in runners.values():
            runner.close()
    return summarised([rows[contender.name] for contender in contenders])


def row_of(contender: Contender, setting: Setting) -> Row:
    """Return the fields of a row that are known before the race."""
    return {
        "contender": contender.name,
        "label": contender.label,
        "device": contender.device,
        "method": contender.method,
        "setting": setting.plain(),
    }


def summarised(rows: Sequence[Row]) -> list[Row]:
    """Add rates, and their ratios to the plain loop and to pfl on the same device.

    A ratio is computed from the two rates of the same turn, because other work on the machine slows both. The row has
    the median over turns.
    """
    found = {row["contender"]: row for row in rows if "turns" in row}
    done = []
    for row in rows:
        if "turns" in row:
            beside = {name: found.get(f"{name}-{row['device']}") for name in REFERENCES}
            row = row | {name: spread(_rates(row, seconds)) for name, seconds in RATES.items()}
            row["over"] = {
                name: {rate: spread(_ratios(row, reference, seconds)) for rate, seconds in RATES.items()}
                for name, reference in beside.items()
                if reference is not None
            }
        done.append(row)
    return done


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum of some values."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _ratios(row: Row, reference: Row, seconds: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(_rates(row, seconds), _rates(reference, seconds), strict=True)]


def _rates(row: Row, seconds: str) -> list[float]:
    # /proc counts in hundredths of a second.
    return [turn["steps"] / max(turn[seconds], 0.01 if seconds == "cpu_seconds" else 1e-9) for turn in row["turns"]]
