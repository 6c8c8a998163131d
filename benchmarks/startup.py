"""Where does the time between a command and its first round go?

Each measurement is a new process, which does what `pefll train` does: it imports the package, opens the GPU, reads the
data, splits it among clients, plans the run, opens the engine, and trains two rounds. The first round includes
compiling and recording. Every network is measured with an empty folder for compiled kernels, and then again with the
kernels that the first process has compiled. The data is CIFAR-10 from `--data-dir`, or noise of the same size if it is
missing.

    python -m benchmarks.startup --out build/startup.json                     # on a GPU, some minutes
    python -m benchmarks.startup --out build/startup.json --small             # tries the script anywhere
    python -m benchmarks.startup --profile resnet20                           # the slowest functions of one process
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

# The parent's clock when it started this process; the same clock in both.
BEGAN = float(os.environ.get("PEFLL_STARTUP_BEGAN", "nan"))
PHASES = (
    *("python", "torch", "package", "device", "data", "partition", "plan"),
    *("engine", "state", "first round", "next round"),
)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="CIFAR-10, if it is there [data]")
    parser.add_argument("--networks", default="lenet,resnet20")
    parser.add_argument("--precision", default="bf16,tf32", help="as in `pefll train`, with commas between")
    parser.add_argument("--method", default="pefll")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--turns", type=int, default=2, help="processes with compiled kernels")
    parser.add_argument("--small", action="store_true", help="few samples: to try the script, not to measure")
    parser.add_argument("--profile", metavar="NETWORK", help="print the slowest functions; kernels are compiled before")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        network, precision = options.child.split(",")
        print(json.dumps(measure(network, precision, options)))
        return
    if options.profile:
        profile(options.profile, options.precision.split(",")[0], options)
        return
    rows = []
    for network in options.networks.split(","):
        for precision in options.precision.split(","):
            with tempfile.TemporaryDirectory() as cache:
                for turn in range(1 + options.turns):
                    seconds = in_new_process(network, precision, cache, options)
                    row = {"network": network, "precision": precision, "compiled before": turn > 0, "seconds": seconds}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    if options.out:
                        write(options.out, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all measurements."""
    from benchmarks.speed.record import machine
    from pefll.core.files import write_json
    from pefll.training.summary import commit

    path.parent.mkdir(parents=True, exist_ok=True)
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    what = {"command": " ".join(["python -m benchmarks.startup", *sys.argv[1:]]), "commit": commit()}
    write_json(path, what | {"machine": machine(), "finished": finished, "rows": rows})


def in_new_process(network: str, precision: str, cache: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each phase of a new process, whose compiled kernels are in the folder `cache`."""
    command = [sys.executable, "-m", "benchmarks.startup", "--child", f"{network},{precision}"]
    command += ["--data-dir", str(options.data_dir), "--clients", str(options.clients), "--method", options.method]
    command += ["--small"] * options.small
    folders = {"TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": f"{cache}/pefll"}
    began = {"PEFLL_STARTUP_BEGAN": repr(time.time())}
    done = subprocess.run(command, env=os.environ | folders | began, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def measure(network: str, precision: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each phase of this process."""
    marks = [BEGAN, time.time()]
    import torch

    marks.append(time.time())
    import pefll.cli.training
    from pefll.engines.device_queue import queue_of
    from pefll.engines.hardware import make_engine, place_data
    from pefll.runs.config import Config
    from pefll.training.resolve import resolve

    assert pefll.cli.training
    marks.append(time.time())
    torch.zeros((), device="cuda" if torch.cuda.is_available() else "cpu")  # makes the GPU's context
    marks.append(time.time())
    samples = data(options)
    marks.append(time.time())
    federation = pefll.data.make_federation(samples, partition="by-class 2", clients=options.clients, seed=0)
    marks.append(time.time())
    config = Config(
        method=options.method,
        data=samples.name,
        partition="by-class 2",
        clients=options.clients,
        model="auto" if network == "lenet" else network,
        precision=precision if torch.cuda.is_available() else "auto",
        settings={"local_steps": 2} if options.small else {},
    )
    spec = resolve(config, federation)
    marks.append(time.time())
    federation = place_data(spec.hardware, federation)
    engine = make_engine(spec.hardware, federation, spec.method, 0, spec.clients_per_round)
    marks.append(time.time())
    try:
        with queue_of(engine).turn():
            server = engine.start()
            synchronise()
            marks.append(time.time())
            for t in range(2):
                server = engine.advance(server, t, 1)
                synchronise()
                marks.append(time.time())
    finally:
        engine.close()
    seconds = {name: end - start for name, (start, end) in zip(PHASES, pairwise(marks), strict=True)}
    return {name: round(value, 3) for name, value in (seconds | {"to first round": marks[-2] - BEGAN}).items()}


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def data(options: argparse.Namespace) -> Any:
    """Return CIFAR-10, or noise of its size."""
    from benchmarks.lockstep import pictures
    from pefll.data import load_samples

    if options.small or not options.data_dir.exists():
        return pictures(3_000 if options.small else 60_000)
    return load_samples("cifar10", options.data_dir)


def profile(network: str, precision: str, options: argparse.Namespace) -> None:
    """Print the slowest functions of a process whose kernels are compiled."""
    import cProfile
    import pstats

    with tempfile.TemporaryDirectory() as cache:
        print(in_new_process(network, precision, cache, options))
        os.environ |= {"TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": f"{cache}/pefll"}
        with cProfile.Profile() as profiler:
            print(measure(network, precision, options))
    for order in ("cumulative", "tottime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(60)


if __name__ == "__main__":
    main()
