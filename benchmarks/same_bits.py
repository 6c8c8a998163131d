"""Checks whether two commits compute the same bits.

The serial engine trains every method for 30 rounds, on digits and on data with the shape of CIFAR, with one and two
processes. It does so with the code of an earlier commit and with the code of this working tree. The states that both
write must be equal, bit for bit, and so must the accuracies. Bits depend on the processor and on torch, so both run on
this machine, with this Python.

    python -m benchmarks.same_bits bd7a61a --out results/same_bits.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open

from benchmarks.speed.record import machine

ROOT = Path(__file__).parents[1]
METHODS = (
    "pefll",
    "pefll-prior",
    "pefll-plus",
    "local",
    "fedavg",
    "per-fedavg",
    "fedrep",
    "pfedme",
    "pfedhn",
    "knn-per",
)
FEW_STEPS = {
    "pefll": ["local_steps=5"],
    "pefll-prior": ["local_steps=5"],
    "pefll-plus": ["local_steps=5"],
}  # the others' defaults are short enough
CIFAR_SHAPED = ("--model", "lenet", "--clients-per-round", "3")


class Case(NamedTuple):
    """One run that is trained with both commits."""

    method: str
    data: str
    processes: int


def write_pictures(path: Path, clients: int = 20, each: int = 40) -> None:
    """Write random images of CIFAR's shape for some clients; their labels depend a little on the images."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, clients * each)
    x = rng.integers(0, 156, (len(y), 3, 32, 32)) + 10 * y[:, None, None, None]
    np.savez(path, x=x.astype(np.uint8), y=y, client=np.repeat(np.arange(clients), each))


def command(method: str, data: str, processes: int, rounds: int, out: Path) -> list[str]:
    """Return the command that trains one run."""
    shaped = CIFAR_SHAPED if data.endswith(".npz") else ()
    settings = [part for setting in FEW_STEPS.get(method, ()) for part in ("--set", setting)]
    return [
        *(sys.executable, "-m", "pefll", "train", "--method", method, "--data", data, *shaped, *settings),
        *("--rounds", str(rounds), "--engine", "serial", "--device", "cpu", "--processes", str(processes)),
        *("--seed", "0", "--out", str(out)),
    ]


def bits_of(run: Path) -> dict[str, Any]:
    """Return the SHA-256 of a run's last state and of its best state, over all tensors sorted by name."""
    (state,) = run.glob("checkpoints/*/state.safetensors")
    sha = hashlib.sha256()
    with safe_open(state, framework="numpy") as file:
        for name in sorted(file.keys()):
            value = file.get_tensor(name)
            sha.update(f"{name} {value.dtype} {value.shape}".encode())
            sha.update(value.tobytes())
    summary = json.loads((run / "summary.json").read_text())
    return {"sha256": sha.hexdigest(), "accuracy": rounded(summary["accuracy"])}


def rounded(value: Any) -> Any:
    """Return figures with six digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def is_same(before: Any, after: Any, name: str = "") -> bool:
    """Return whether states and accuracies are equal; sums of losses may differ by rounding."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(is_same(before[name], after[name], name) for name in before)
    return math.isclose(before, after, rel_tol=1e-3) if name == "loss" else bool(before == after)


@contextmanager
def tree_of(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a new folder, which is removed at the end of the block."""
    place = folder / "earlier"
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


class Comparison:
    """Runs of an earlier commit and of this working tree.

    Args:
        folder: temporary folder for data and runs.
        rounds: number of rounds of every run.
    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        write_pictures(folder / "pictures.npz")

    def bits(self, tree: Path, case: Case) -> dict[str, Any]:
        """Train one run with the code of a tree and return its bits."""
        source = case.data if case.data == "digits" else str(self.folder / f"{case.data}.npz")
        out = self.folder / "-".join((tree.name, *map(str, case)))
        made = subprocess.run(
            command(case.method, source, case.processes, self.rounds, out),
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise SystemExit(f"{tree.name}: {' '.join(made.args)} failed:\n{made.stderr}")
        return bits_of(out)

    def rows(self, earlier: Path, cases: list[Case], tell: Callable[[], None]) -> list[dict[str, Any]]:
        """Return a row with the bits of both commits for each case; two runs train at a time."""

        def row(case: Case) -> dict[str, Any]:
            before, after = self.bits(earlier, case), self.bits(ROOT, case)
            tell()
            return case._asdict() | {"equal": is_same(before, after), "before": before, "after": after}

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(row, cases))


def main() -> int:
    """Run both commits and compare them; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default=",".join(METHODS), help="methods, such as pefll,fedavg")
    parser.add_argument("--data", default="digits,pictures")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--out", type=Path, help="a JSON file for what was compared")
    options = parser.parse_args()
    counts = [int(count) for count in options.processes.split(",")]
    cases = list(starmap(Case, product(options.only.split(","), options.data.split(","), counts)))
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary, Progress(console=console) as bar:
        folder = Path(temporary)
        task = bar.add_task("runs", total=len(cases))
        with tree_of(options.commit, folder) as earlier:
            rows = Comparison(folder, options.rounds).rows(earlier, cases, lambda: bar.advance(task))
    for row in rows:
        if not row["equal"]:
            console.print(f"{row['method']} on {row['data']}, {row['processes']} processes: [red]differs[/]")
    equal = sum(row["equal"] for row in rows)
    console.print(f"{equal} of {len(rows)} runs are equal, bit for bit")
    if options.out:
        record = {
            "command": "python -m benchmarks.same_bits " + " ".join(sys.argv[1:]),
            "commits": [sha_of(options.commit), sha_of("HEAD")],
            "machine": machine(),
            "runs": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(equal < len(rows))


def sha_of(commit: str) -> str:
    """Return the full name of a commit."""
    asked = ["git", "-C", str(ROOT), "rev-parse", commit]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
