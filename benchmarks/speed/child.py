"""One contender in its own process. It reads a line with a number of rounds, and writes a line with their time."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.speed.contender import Contender
from benchmarks.speed.processes import cpu_seconds, own_peak_bytes
from benchmarks.speed.setting import Setting, prepare


def measured(asked: Iterable[str], out: TextIO, steps_per_round: int) -> Iterator[int]:
    """Yield the number of rounds of each turn; when the caller asks for the next turn, write the time of the last.

    Args:
        asked: lines with a number of rounds; 0 or the last line ends the race.
        out: stream for JSON lines.
        steps_per_round: number of client steps in a round.
    """
    for line in asked:
        rounds = int(line)
        if rounds == 0:
            return
        _wait_for_gpu()
        used, started = cpu_seconds(os.getpid()), time.perf_counter()
        yield rounds
        _wait_for_gpu()
        seconds = time.perf_counter() - started
        turn = {
            "rounds": rounds,
            "steps": rounds * steps_per_round,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds(os.getpid()) - used,
        }
        tell(out, turn)


def tell(out: TextIO, what: dict[str, Any]) -> None:
    """Write one JSON line."""
    out.write(json.dumps(what) + "\n")
    out.flush()


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def main() -> int:
    """Run the contender and the setting that the JSON in the first argument names."""
    # Output that contenders print must not mix with the lines of the pipe.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    what = json.loads(sys.argv[1])
    setting = Setting.from_plain(what["setting"])
    work = prepare(setting, Path(what["data_dir"]) if what["data_dir"] else None)
    weights = Contender(**what["contender"]).run(work, measured(sys.stdin, out, setting.steps_per_round))
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    finite = weights is None or bool(torch.isfinite(weights).all())
    tell(out, {"own_peak_bytes": own_peak_bytes(), "gpu_peak_bytes": gpu, "finite": finite})
    return 0


if __name__ == "__main__":
    sys.exit(main())
