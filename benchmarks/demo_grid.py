"""The search for the demo's learning rates: validation accuracy on seen clients, mean over three seeds.

python -m benchmarks.demo_grid        # some minutes
"""

from __future__ import annotations

import argparse
from itertools import product

from pefll.experiments.demo import SETTINGS, train_demo

GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "local": {"client_lr": (5e-3, 2e-2, 5e-2)},
    "fedavg": {"client_lr": (2e-2, 5e-2, 1e-1)},
    "pefll": {"client_lr": (2e-2, 5e-2, 1e-1), "server_lr": (1e-3, 2e-3)},
}


def main() -> None:
    """Print a line per method and setting, with a mark for the settings of the demo."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for method, axes in GRID.items():
        for values in product(*axes.values()):
            tried = dict(zip(axes, values, strict=True))
            scores = []
            for seed in range(3):
                seen = train_demo(method, seed, tried).evaluate("validation").seen
                assert seen is not None
                scores.append(100 * seen.per_sample)
            mark = "  <- the demo's" if SETTINGS[method] | tried == SETTINGS[method] else ""
            print(f"{method:7} {tried}: {sum(scores) / len(scores):.2f}%{mark}", flush=True)


if __name__ == "__main__":
    main()
