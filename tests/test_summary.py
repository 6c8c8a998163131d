"""What a run leaves behind: its summary, its best and its final state, the commit that made it."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import pefll
from pefll.backend.native import compiler, pooled
from pefll.core.errors import PefllError
from pefll.engines.workers import can_fork
from pefll.training import pipeline
from pefll.training.fitting import fit
from pefll.training.run import load
from tests.federations import flat, ragged

KEYS = {
    "method", "dataset", "partition", "num_clients", "num_seen", "num_unseen", "rounds", "clients_per_round",
    "local_steps", "seed", "device", "precision", "version", "commit", "train_seconds", "eval_seconds",
    "client_steps_per_second", "bytes_down", "bytes_up", "peak_memory_bytes", "best_round", "accuracy",
}  # fmt: skip


@pytest.mark.parametrize("method", ["pefll", "fedavg", "local"])
def test_the_summary_has_what_every_tool_counts_on(tmp_path, method):
    settings = {"epochs": 1} if method == "local" else {"local_steps": 3}
    processes = 2 if method == "fedavg" and can_fork() else 1
    options = {"processes": processes, "engine": "serial" if method == "fedavg" else "auto"}
    run = fit(ragged(), method, rounds=4, clients_per_round=2, out=tmp_path, **options, **settings)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("check"), "the file's own, which is no part of what came out"
    assert summary == json.loads(json.dumps(run.summary))
    assert summary.keys() >= KEYS
    assert (summary["num_clients"], summary["num_seen"], summary["num_unseen"]) == (8, 6, 2)
    assert summary["rounds"] == (0 if method == "local" else 4)
    for state in ("best", "final"):
        for group in ("seen", "unseen"):
            values = summary["accuracy"][state][group]
            assert values.keys() >= {"per_sample", "per_client", "masked", "worst_tenth"}
            assert all(0 <= values[key] <= 1 for key in ("per_sample", "per_client", "masked", "worst_tenth"))
    assert summary["peak_memory_bytes"] > 1e6
    assert summary["processes"] == processes
    assert summary["compiler"] == (compiler.version() if pooled.works() else None)
    loaded = load(tmp_path)
    assert loaded.summary == summary
    assert torch.equal(flat(loaded.server), flat(run.server))
    assert torch.equal(flat(loaded.final), flat(run.final))
    again = loaded.evaluate("test", ragged())
    assert again.seen._asdict() == pytest.approx(summary["accuracy"]["best"]["seen"])
    with pytest.raises(PefllError, match="PEFLL-T117"):
        loaded.evaluate()
    if method == "pefll":
        with np.load(tmp_path / "descriptors.npz") as saved:
            assert saved["descriptors"].shape == (8, 3)
            assert saved["seen"].sum() == 6
            np.testing.assert_array_equal(saved["histograms"], ragged().histograms())


def test_best_and_final_are_scored_apart(tmp_path, monkeypatch):
    values = iter([0.9, 0.1])

    class Fake(pipeline.Evaluator):
        def _read(self, scores):
            result = super()._read(scores)
            return result._replace(seen=result.seen._replace(per_sample=next(values)))

    monkeypatch.setattr(pipeline, "Evaluator", Fake)
    settings = {"local_steps": 8, "client_lr": 0.3, "clients_per_round": 4, "processes": 1}
    run = fit(ragged(sizes=(30,)), "fedavg", rounds=4, eval_every=2, **settings)
    assert run.summary["best_round"] == 2
    assert not torch.equal(run.server.theta, run.final.theta)
    assert run.summary["accuracy"]["best"] != run.summary["accuracy"]["final"]


def test_the_commit_is_recorded(monkeypatch, tmp_path):
    from pefll.training.summary import commit

    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    monkeypatch.delenv("PEFLL_COMMIT", raising=False)
    assert commit().removesuffix("+changes") == head.stdout.strip()
    monkeypatch.setenv("PEFLL_COMMIT", "from elsewhere")
    assert commit() == "from elsewhere"
    monkeypatch.delenv("PEFLL_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""


def doubled(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(output, y, reduction="none")


def test_a_summary_names_code_that_was_given_in_python():
    """It was `<in-Python>`, also in tables."""
    top2 = pefll.Metric("top2", lambda output, y: (output.topk(2).indices == y[:, None]).any(dim=1).float())
    named = {
        functools.partial(doubled): "<doubled>",
        torch.nn.CrossEntropyLoss(reduction="none"): "<CrossEntropyLoss>",
        (lambda output, y: doubled(output, y)): "<lambda>",
        doubled: "tests.test_summary:doubled",
    }
    usual = {"rounds": 1, "clients_per_round": 2, "local_steps": 1}
    for loss, name in named.items():
        run = pefll.fit(ragged(), "fedavg", task=pefll.Classification(own_loss=loss, extra=(top2, "auc")), **usual)
        assert run.summary["task"] == f"classification own_loss={name} extra=<top2>,auc"
