"""Measures bounds beside the error of unseen clients during training: python -m benchmarks.bounds_in_training.

It is a short version of `pefll reproduce certificates`, whose 5,000 rounds need a GPU: fewer rounds, fewer clients per
round, fewer local steps, and learning rates that are larger for this reason. These were named before any run, and
nothing was searched. The first half of the rounds makes the prior, with half of the seen clients. A stopped run goes on
if --folder is the same.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import pefll
from pefll.core.files import make_folder, write_json
from pefll.engines.hardware import processor
from pefll.experiments.certificates import HALF, QUERY, SHOWN, THEOREM, UNEQUAL, BoundsInTraining, KeepStates
from pefll.experiments.pages import markdown_table
from pefll.report.certificate import bounds_over_training
from pefll.training.summary import commit

SETTINGS: dict[str, Any] = {"local_steps": 10, "client_lr": 0.01, "server_lr": 1e-3}


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the bounds and the unseen clients' error at each state of one run, as JSON."""
    federation = pefll.make_federation(
        pefll.load_samples(given.data, given.data_dir),
        partition=given.partition,
        clients=given.clients,
        seed=given.seed,
    )
    run = pefll.fit(
        federation,
        pefll.PeFLL(**SETTINGS),
        rounds=given.rounds,
        seed=given.seed,
        out=folder,
        console=Console(stderr=True),
        callbacks=[KeepStates()],
        clients_per_round=given.clients_per_round,
        eval_every=given.rounds,
        checkpoint_every=given.rounds // given.states,
        prior_clients=0.5,
        device="cpu",
    )
    measured = BoundsInTraining().of(run, folder)
    return {
        "command": command_of(given),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "platform": platform.platform(), "torch": torch.__version__},
        "settings": SETTINGS,
        "num_seen": federation.num_seen,
        "num_unseen": federation.num_unseen,
        **measured,
    }


def command_of(given: argparse.Namespace) -> str:
    """Return the command that makes the same figures again."""
    clients = "" if given.clients is None else f" --clients {given.clients}"
    return (
        f"python -m benchmarks.bounds_in_training --data {given.data} --partition '{given.partition}'{clients} "
        f"--clients-per-round {given.clients_per_round} --rounds {given.rounds} --states {given.states} "
        f"--seed {given.seed}"
    )


def heading(given: argparse.Namespace, record: dict[str, Any]) -> str:
    """Return what was trained, in words."""
    clients = record["num_seen"] + record["num_unseen"]
    return f"{given.data}, {given.partition}, {clients:,} clients, {given.rounds} rounds"


def markdown(record: dict[str, Any], title: str) -> list[str]:
    """Return the lines of the page: a table of the states, and the statements after the last round."""
    names = (THEOREM, UNEQUAL, HALF, QUERY)
    shown = [name for name in names if any(name in point["bounds"] for point in record["points"])]
    states = [
        [
            *(f"{point['round']:,}", f"{point['unseen_error']:.3f}"),
            *(f"{point['bounds'][name]:.4g}" if name in point["bounds"] else "—" for name in shown),
        ]
        for point in record["points"]
    ]
    last = [
        [one["name"], f"{one['measured']:.3f}", f"{one['bound']:.4g}", one["promise"]] for one in record["statements"]
    ]
    prior = record["prior_unseen_error"]
    return [
        f"# Bounds during training: {title}",
        "",
        f"`{record['command']}`, {record['num_seen']} seen and {record['num_unseen']} unseen clients. Each bound holds "
        f"with confidence {1 - record['delta']:.0%}. The clients that make the prior train alone in the first half of "
        f"the rounds. Its networks have an error of {prior:.3f} on unseen clients.",
        "",
        *markdown_table(["round", "unseen error", *(SHOWN[name] for name in shown)], states),
        "",
        "## After the last round",
        "",
        *markdown_table(["statement", "measured", "bound", "promise"], last),
    ]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--partition", default="by-class 2")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--clients-per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--states", type=int, default=4, help="how often bounds are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the run here, so that a stopped one goes on")
    parser.add_argument("--out", type=Path, default=Path("results/bounds_in_training.json"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train the run, measure its bounds, and write JSON, page and figure."""
    given = parsed(arguments)
    with tempfile.TemporaryDirectory() as kept:
        record = measure(given, given.folder or Path(kept) / "run")
    make_folder(given.out.parent)
    write_json(given.out, record)
    title = heading(given, record)
    given.out.with_suffix(".md").write_text("\n".join(markdown(record, title)) + "\n")
    bounds_over_training({title: record["points"]}, given.out.with_suffix(".png"), SHOWN, "unseen clients' error")
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
