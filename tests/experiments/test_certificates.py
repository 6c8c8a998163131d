"""The bounds during training, on a small federation of digits."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

import pefll
from pefll.core.errors import PefllError
from pefll.experiments import certificates, reproduce
from pefll.experiments.certificates import EXPERIMENT, BoundsInTraining
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.pages import write_page
from pefll.experiments.reproduce import read_status, run_missing
from pefll.experiments.table1 import Cell
from pefll.report import certificate as report
from pefll.runs.record import run_folders

PLAIN = Cell("digits", 20, "dirichlet 1", "Digits", 1100, clients_per_round=2, model="mlp", tag="dirichlet-1")
CELLS = (PLAIN, PLAIN._replace(prior_clients=0.5, tag="prior"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the folder of two runs, and their results by whether they have a prior."""
    folder = tmp_path_factory.mktemp("certificates")
    row = certificates.ROW._replace(settings={"embedding": "mlp", "local_steps": 2, "hypernetwork": "S"})
    small = dataclasses.replace(
        EXPERIMENT, cells=CELLS, rows=(row,), panels=(), measure=BoundsInTraining(config={"checkpoint_every": 2})
    )
    quiet = Console(quiet=True)
    status = read_status(folder / "results", (0,), 8, None, small)
    assert len(status.missing) == 2  # the same data and settings, but two runs
    run_missing(status, folder / "results", folder / "runs", folder, 3, quiet, eval_every=4)
    found = [json.loads(path.read_text()) for path in (folder / "results").glob("*.json")]
    assert read_status(folder / "results", (0,), 8, None, small).missing == []
    return folder, {bool(one.get("prior_clients")): one for one in found}


def test_states_are_deleted_when_their_bounds_are_written(measured, tmp_path, monkeypatch):
    folder, _ = measured
    assert not list((folder / "runs").rglob(certificates.STATES))

    row = certificates.ROW._replace(settings={"embedding": "mlp", "local_steps": 1, "hypernetwork": "S"})
    cell = PLAIN._replace(clients=10, clients_per_round=1)
    small = dataclasses.replace(
        EXPERIMENT, cells=(cell,), rows=(row,), panels=(), measure=BoundsInTraining(config={"checkpoint_every": 1})
    )

    def run() -> None:
        status = read_status(tmp_path / "results", (0,), 2, None, small)
        run_missing(status, tmp_path / "results", tmp_path / "runs", tmp_path, 1, Console(quiet=True), eval_every=4)

    def full(*_, **__):
        raise PefllError("the disk is full", "PEFLL-A102")

    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "collect", full)
        with pytest.raises(PefllError, match="disk is full"):
            run()
    (states,) = (tmp_path / "runs").rglob(certificates.STATES)
    assert len(list(states.iterdir())) == 2  # nothing is lost, so the result can still be made
    run()
    (result,) = (tmp_path / "results").glob("*.json")
    assert len(json.loads(result.read_text())["measured"]["certificates"]["points"]) == 2
    assert not states.exists()
    result.unlink()
    with pytest.raises(PefllError, match=r"has no states any more.*delete the folder") as gone:
        run()
    assert gone.value.code == "PEFLL-X018"


def test_each_state_has_bounds(measured):
    folder, results = measured
    plain, prior = (results[one]["measured"]["certificates"] for one in (False, True))
    assert [point["round"] for point in plain["points"]] == [2, 4, 6, 8]
    assert [set(point["bounds"]) & {"prior-half", "query"} for point in prior["points"]] == [
        set(), set(), {"prior-half", "query"}, {"prior-half", "query"}
    ]  # fmt: skip
    assert plain["prior_unseen_error"] is None
    assert plain["statements"][-1]["bound"] == pytest.approx(list(plain["points"][-1]["bounds"].values())[-1], abs=1e-5)
    (path,) = [
        one.path for place in (folder / "runs").iterdir() for one in run_folders(place) if "prior" in str(one.path)
    ]
    run = pefll.load(path)
    assert dataclasses.replace(run, server=run.final).evaluate().unseen.per_client == pytest.approx(
        1 - prior["points"][-1]["unseen_error"], abs=1e-5
    )
    assert any("prior_0.5" in path.name for path in (folder / "results").iterdir())


def _result(bound: float, query: float, prior_error: float | None) -> dict:
    terms = {
        "kl_hypernetwork": 200.0, "kl_embedder": 2.0, "clients": 100, "models_term": 0.5, "loss_bound": 0.2,
    }  # fmt: skip
    statements = [{"name": "theorem-3.2", "bound": bound, "terms": terms}]
    bounds = {"theorem-3.2": bound}
    if prior_error is not None:
        statements += [{"name": name, "bound": query} for name in ("prior-half", "query", "query-prior")]
        bounds |= {"query": query}
    point = {"round": 10, "unseen_error": 0.1, "bounds": bounds}
    both = {group: {"per_sample": 0.8} for group in ("seen", "unseen")}
    kept = {"delta": 0.05, "points": [point], "statements": statements, "prior_unseen_error": prior_error}
    return {"seed": 0, "accuracy": {"best": both}, "measured": {"certificates": kept}}


def test_verdicts_and_the_page(tmp_path):
    plain, prior = certificates.PLAIN[0].name, certificates.WITH_PRIOR[0].name
    found = {("PeFLL", plain): [_result(33.0, 0, None)], ("PeFLL", prior): [_result(0.9, 0.3, 0.35)]}
    evidence = Evidence(EXPERIMENT, found, (0,), 10)
    words = [(one.word, one.figure) for one in evidence.verdicts() if one.word != NOTHING]
    assert words == [(HOLDS, "33"), (HOLDS, "0.300"), (FAILS, "-0.050")]
    assert "largest part: ‖η_h‖² term 1" in evidence.verdicts()[0].interval
    paths = write_page(evidence, tmp_path)
    assert paths[-1].name == "certificates.png"
    assert certificates.bounds_over_training is report.bounds_over_training  # one function draws them
    assert "| 0.100 | 33 | ‖η_h‖² term 1 | — | — | — | — |" in paths[0].read_text()
