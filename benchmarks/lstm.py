"""How many steps a second do clients take on LEAF's LSTM: our kernels, the plain layer, and a loop with cuDNN?

Rounds of FedAvg with two layers of 256, texts of 80 characters and batches of 32 take turns, for 5 and for 50 clients:
torch's own LSTM one client after another; our vector engine with the plain layer; and with our kernels, in TF32 and
bfloat16, with one launch for all time steps and with one for each. Before that, states and gradients of a layer are
compared with the plain layer in float64.

    python -m benchmarks.lstm --out build/lstm.json              # on a GPU
    python -m benchmarks.lstm --out build/lstm.json --small      # tries the script anywhere
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.speed import ours
from benchmarks.speed.contender import Contender
from benchmarks.speed.ours_lstm import WAYS, choose
from benchmarks.speed.plan import lstm
from benchmarks.speed.race import Row, race
from benchmarks.speed.record import machine
from benchmarks.speed.setting import Setting, prepare
from pefll.backend import client_axis
from pefll.core.errors import first_line
from pefll.core.files import write_json
from pefll.engines.settings import set_for_engines
from pefll.models.lstm import lstm_layer
from pefll.training.summary import commit

PRECISIONS = ("float32", "tf32", "bf16")
NAMES = ("states", "input", "weights of the input", "weights of the state", "bias", "other bias")


def contenders(device: str) -> list[Contender]:
    """Return who races on a device."""
    if device == "cpu":
        options = {"engine": "vector", "way": "plain"}
        return [
            Contender("plain-cpu", "plain loop, torch's LSTM", "plain"),
            Contender("vector-plain", "vector engine, plain layer", "ours_lstm", options=options),
        ]
    found = [Contender("plain-cuda", "plain loop, cuDNN", "plain", device, options={"device": device})]
    ways = (("tf32", "plain"), ("tf32", "steps"), ("tf32", "fused"), ("bf16", "steps"), ("bf16", "fused"))
    for precision, way in ways:
        options = {"engine": "vector", "device": device, "precision": precision, "way": way}
        label = f"vector engine, {precision}, {WAYS[way]}"
        found.append(Contender(f"vector-{precision}-{way}", label, "ours_lstm", device, options=options))
    return found


def errors(setting: Setting, hidden: int, device: str) -> list[dict[str, Any]]:
    """Return the largest error of a layer's states and gradients, relative to their largest number."""
    torch.manual_seed(0)
    gates, length = 4 * hidden, setting.shape[0]
    shapes = ((length, setting.batch, hidden), (gates, hidden), (gates, hidden), (gates,), (gates,), (length, 1, 1))
    given = [torch.randn(setting.cohort, *shape, device=device) * hidden ** -(0.5 * (i > 0))
             for i, shape in enumerate(shapes)]  # fmt: skip

    def one(*inputs: Tensor) -> tuple[Tensor, ...]:
        states, pull_back = torch.func.vjp(lstm_layer, *inputs[:-1])  # type: ignore[misc]
        return states, *pull_back(inputs[-1].cos() * states.detach())

    wanted = torch.vmap(one)(*(each.double() for each in given))
    rows = []
    for precision in PRECISIONS if client_axis.available(given[0]) else ():
        for way in ("steps", "fused"):
            set_for_engines(precision)
            choose(way)
            row: dict[str, Any] = {"clients": setting.cohort, "precision": precision, "way": way}
            try:
                got, again = (torch.vmap(one)(*given) for _ in range(2))
            except Exception as error:  # noqa: BLE001 - the other ways are still worth measuring
                rows.append(row | {"repeats": first_line(error)} | dict.fromkeys(NAMES, ""))
                continue
            same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
            found = {
                name: float((a - b).abs().max() / b.abs().max()) for name, a, b in zip(NAMES, got, wanted, strict=True)
            }
            rows.append(row | {"repeats": same} | found)
    return rows


def profile(setting: Setting, precision: str, console: Console) -> None:
    """Print which kernels take most of the time of a round."""

    def turns() -> Any:
        yield 2
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            yield 1
            torch.cuda.synchronize()
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=70)
        console.print(f"c = {setting.cohort}, {precision}\n{table}", markup=False, soft_wrap=True)

    ours.run(prepare(setting), turns(), engine="vector", device="cuda", precision=precision)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print client steps a second."""
    table = Table("", "c", "client steps/s", "least", "most", "× plain loop")
    for row in rows:
        if "error" in row:
            table.add_row(row["label"], str(row["setting"]["cohort"]), row["error"])
            continue
        rate = row["steps_per_second"]
        over = [f"{value['steps_per_second']['median']:.1f}" for name, value in row["over"].items() if name == "plain"]
        figures = (f"{rate[name]:,.0f}" for name in ("median", "least", "most"))
        table.add_row(row["label"], str(row["setting"]["cohort"]), *figures, *over)
    console.print(table)


def main() -> None:
    """Compare, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the figures")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=1.0)
    parser.add_argument("--among", default="", help="some contenders: a part of their names, such as bf16")
    parser.add_argument("--profile", action="store_true", help="also print the time of each kernel; needs a GPU")
    parser.add_argument("--small", action="store_true", help="short texts and few turns: to try the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings, hidden = [lstm(5), lstm(50)], 256
    if options.small:
        small: dict[str, Any] = {"clients": 6, "steps": 2, "batch": 4, "samples": 8, "shape": (5,)}
        settings, hidden = [replace(lstm(cohort), **small) for cohort in (1, 2)], 20
        options.turns, options.turn_seconds = 1, 0.0
    # In a file or a pipe there is no width to keep to.
    console = Console(width=None if Console().is_terminal else 150)
    wrong = [row for setting in settings for row in errors(setting, hidden, device)]
    if wrong:
        table = Table(*wrong[0], title="largest errors of a layer, against float64")
        for row in wrong:
            table.add_row(*(f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    chosen = [one for one in contenders(device) if options.among in one.name]
    rows = []
    for setting in settings:
        found = race(setting, chosen, options.turns, options.turn_seconds)
        show(found, console)
        rows += found
    origin = {"machine": machine(), "commit": commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, {**origin, "small": options.small, "errors": wrong, "rows": rows})
    if options.profile and device == "cuda":
        choose("fused")
        for setting in settings:
            for precision in ("tf32", "bf16"):
                profile(setting, precision, console)


if __name__ == "__main__":
    main()
