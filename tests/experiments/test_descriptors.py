"""The correlation of descriptors over training, on a small Dirichlet federation of digits."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from pefll.experiments import descriptors
from pefll.experiments.descriptors import EXPERIMENT, DescriptorCorrelation
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.extrapolation import NewClientAccuracy
from pefll.experiments.pages import write_page
from pefll.experiments.reproduce import joined, most_valuable_first, read_status, run_missing
from pefll.experiments.table1 import Cell
from pefll.report.descriptors import distances, mean_correlation, read_descriptors
from pefll.runs.record import run_folders

SMALL = Cell("digits", 20, "dirichlet 0.1", "Digits", 1100, clients_per_round=2, model="mlp", tag="dirichlet-0.1")


def test_a_run_is_measured_and_its_result_keeps_it(tmp_path):
    row = descriptors.ROW._replace(settings={"embedding": "mlp", "local_steps": 2, "server_lr": 0.01})
    small = dataclasses.replace(
        EXPERIMENT, cells=(SMALL,), rows=(row,), measure=DescriptorCorrelation(config={"checkpoint_every": 2})
    )
    results = tmp_path / "results"
    status = read_status(results, (0,), 4, None, small)
    quiet = Console(quiet=True)
    run_missing(status, results, tmp_path / "runs", tmp_path, 3, quiet, scheduler=most_valuable_first, eval_every=4)
    (path,) = results.glob("*.json")
    assert path.name.startswith("digits-pefll-n20-dirichlet_0.1-embedding_mlp-")
    kept = json.loads(path.read_text())
    measured = kept["measured"]["descriptors"]
    assert measured["rounds"] == [0, 2, 4]
    assert len(set(measured["correlation"])) == 3
    assert len(measured["plane_x"]) == len(measured["main_class"]) == 20
    # The run's own map, made at its best round, which is the last one here, says the same.
    (folder,) = [one for seeds in (tmp_path / "runs").iterdir() for one in run_folders(seeds)]
    own = mean_correlation(*distances(read_descriptors(folder)))
    assert measured["correlation"][-1] == pytest.approx(own, abs=1e-4)
    assert read_status(results, (0,), 4, None, small).missing == []
    # A result without the measure does not do, and a run that is measured serves those that need no measure.
    del kept["measured"]
    path.write_text(json.dumps(kept))
    again = read_status(results, (0,), 4, None, small)
    plain = read_status(results, (1, 0), 4, None, dataclasses.replace(small, measure=None))
    assert [len(one.missing) for one in (again, plain)] == [1, 1]
    wanted = read_status(results, (1,), 4, None, small)
    assert [job.measures for job in joined([plain, wanted]).missing] == [(small.measure,)]
    other = read_status(results, (1,), 4, None, dataclasses.replace(small, measure=NewClientAccuracy()))
    assert [len(job.measures) for job in joined([wanted, other, plain]).missing] == [2]


def result(seed: int, correlation: list[float]) -> dict:
    both = {group: {"per_sample": 0.8, "masked": 0.9} for group in ("seen", "unseen")}
    measured = {
        "rounds": [0, 250, 500], "correlation": correlation, "plane_x": [0, 1, 2], "plane_y": [2, 1, 0],
        "variance": [0.6, 0.2], "main_class": [0, 1, 1], "num_seen": 2,
    }  # fmt: skip
    return {"seed": seed, "accuracy": {"best": both}, "measured": {"descriptors": measured}}


def test_statements_and_pictures(tmp_path):
    found = {
        ("PeFLL", "cifar10-100-dirichlet-0.1"): [result(0, [0.4, 0.8, 0.9]), result(1, [0.5, 0.8, 0.91])],
        ("PeFLL", "cifar10-500-dirichlet-0.1"): [result(0, [0.9, 0.85, 0.7])],
    }
    both = Evidence(EXPERIMENT, found, (0, 1), 500)
    words = [one.word for one in both.verdicts()]
    assert words[:3] == ["not decided", FAILS, NOTHING]  # two seeds that rise by 0.5 and 0.41 leave a wide interval
    assert words[3:6] == ["not decided", FAILS, NOTHING]
    assert words[6:] == [FAILS, NOTHING]
    assert both.verdicts()[6].figure == "-0.200"
    paths = write_page(both, tmp_path)
    assert [path.name for path in paths[2:]] == ["descriptors.png", "descriptors_map.png"]
    assert "| 500 | 0.905 ± 0.007 | 0.700 | — |" in paths[0].read_text()
    steady = {("PeFLL", "cifar10-100-dirichlet-0.1"): [result(seed, [0.4, 0.8, 0.93]) for seed in range(3)]}
    assert [one.word for one in Evidence(EXPERIMENT, steady, (0, 1, 2), 500).verdicts()][0:4:3] == [HOLDS, HOLDS]
    assert np.isclose(EXPERIMENT.cells[0].cohort, 5)
