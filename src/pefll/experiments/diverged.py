"""Records of runs that diverged, so that they are not trained again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pefll.core.files import make_folder, read_json, write_json
from pefll.experiments.jobs import is_result_of
from pefll.experiments.table1 import Job
from pefll.training.resolve import RunSpec
from pefll.training.summary import commit

FOLDER = "diverged"  # inside the folder of results
Seeds = Mapping[int, Sequence[str]]  # seed -> the precisions in which its run diverged
DivergedRuns = Mapping[str, Seeds]  # by "row/cell"


def write_diverged(spec: RunSpec, error: Exception, results: Path) -> Path:
    """Write that a run diverged, and return the file's path. Delete the file to train the run again."""
    assert spec.folder is not None
    config, federation = spec.config, spec.federation
    make_folder(results / FOLDER)
    precision = spec.hardware.precision
    path = results / FOLDER / f"{spec.folder.path.parent.name}-{precision}-{spec.folder.path.name}.json"
    record = {
        "error": str(error),
        "command": config.command(),
        "method": config.method,
        "settings": config.settings,
        "dataset": federation.name,
        "partition": federation.partition,
        "model": spec.model,
        "num_clients": federation.num_clients,
        "num_unseen": federation.num_unseen,
        "rounds": config.rounds,
        "clients_per_round": spec.clients_per_round,
        "seed": config.seed,
        "precision": precision,
        "commit": commit(),
    }
    write_json(path, record)
    return path


def read_diverged(results: Path) -> list[dict[str, Any]]:
    """Return the records of all runs that diverged."""
    return [read_json(path) for path in sorted((results / FOLDER).glob("*.json"))]


def diverged_seeds(records: Sequence[dict[str, Any]], job: Job, rounds: int) -> Seeds:
    """Return the seeds with which a job's training diverged, and the precisions of each.

    Args:
        records: of `read_diverged`.
        job: a run; its seed does not matter.
        rounds: of cells that do not say how many they have.
    """
    trained = job._replace(measures=(), evaluations=({},))
    found: dict[int, list[str]] = {}
    for record in records:
        if is_result_of(record, trained, rounds):
            found.setdefault(record["seed"], []).append(record["precision"])
    return dict(sorted(found.items()))
