"""Which kernels take the time of a round? For any client model, number of clients and precision, on a GPU.

It prints the client steps per second of FedAvg, and the time of each kernel in one round.

    python -m benchmarks.round_kernels --model resnet20 --cohorts 5,50 --precision bf16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.speed import ours
from benchmarks.speed.record import machine
from benchmarks.speed.setting import Setting, prepare
from pefll.core.files import write_json
from pefll.training.summary import commit


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--cohorts", default="5,50")
    parser.add_argument("--precision", default="bf16", help="as in `pefll train`, with commas between")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement")
    parser.add_argument("--rows", type=int, default=30, help="kernels to print")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 150)
    found = []
    for cohort in map(int, options.cohorts.split(",")):
        setting = Setting(model=options.model, cohort=cohort, clients=max(100, cohort))
        for precision in options.precision.split(","):
            result = measure(setting, precision, options)
            found.append({"setting": setting.plain(), "precision": precision} | result)
            console.print(f"c = {cohort}, {precision}: {result['steps_per_second']:,.0f} client steps/s")
            console.print(_table(result["kernels"][: options.rows]), markup=False, soft_wrap=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(options.out, {"machine": machine(), "commit": commit(), "finished": finished, "rows": found})


def measure(setting: Setting, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return client steps per second, and the kernels of one round with their number and microseconds."""
    result: dict[str, Any] = {}

    def turns() -> Iterator[int]:
        yield 2
        torch.cuda.synchronize()
        rounds, began = 0, time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            yield 2
            torch.cuda.synchronize()
            rounds += 2
        seconds = time.perf_counter() - began
        result["steps_per_second"] = round(rounds * setting.steps_per_round / seconds, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            yield 1
            torch.cuda.synchronize()
        kernels = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
        result["kernels"] = [
            {"name": one.key, "calls": one.count, "microseconds": round(one.self_device_time_total, 1)}
            for one in kernels
        ]

    ours.run(prepare(setting), turns(), options.method, engine="vector", device="cuda", precision=precision)
    return result


def _table(kernels: list[dict[str, Any]]) -> str:
    lines = [f"{one['microseconds']:>12,.1f} us {one['calls']:>7} x  {one['name'][:110]}" for one in kernels]
    total = sum(one["microseconds"] for one in kernels)
    return "\n".join([*lines, f"{total:>12,.1f} us in these kernels"])


if __name__ == "__main__":
    main()
