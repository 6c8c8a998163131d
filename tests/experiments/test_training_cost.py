"""Accuracy against rounds and gigabytes: bytes by the paper's formula, and curves above each other."""

from __future__ import annotations

import numpy as np
import pytest

from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence
from pefll.experiments.pages import write_page
from pefll.experiments.training_cost import (
    EXPERIMENT,
    Curve,
    ahead_verdict,
    counted_bytes,
    curve,
    differences,
    formula_bytes,
)

LENET = 121_182  # |θ| on CIFAR-10, as in the paper
ROUNDS = 4


def result(method: str, seed: int = 0, extra: int = 0, rises: float = 0.1) -> dict:
    # The ConvNet embedding: 13 channels in place of 3, 26 outputs in place of 10.
    values = LENET + (LENET + 10 * 16 * 25 + 16 * 85 + 26 if method == "pefll" else 0)
    settings = {"embedding": "convnet"} if method == "pefll" else {}
    one_way = 5 * values * 4 * ROUNDS
    both = {group: {"per_sample": rises * ROUNDS, "masked": 0.9} for group in ("seen", "unseen")}
    return {
        "method": method, "settings": settings, "dataset": "cifar10", "num_clients": 100, "model": "lenet",
        "clients_per_round": 5, "rounds": ROUNDS, "seed": seed, "bytes_down": one_way + extra, "bytes_up": one_way,
        "accuracy": {"best": both},
        "validation": [{"round": at, "seen": rises * at, "unseen": rises * at} for at in range(1, ROUNDS + 1)],
    }  # fmt: skip


def test_bytes_are_those_of_the_formula():
    assert formula_bytes(result("fedavg")) == 2 * 5 * 4 * LENET
    for method in ("fedavg", "pefll"):
        assert counted_bytes(result(method)) == formula_bytes(result(method))
    assert counted_bytes(result("pefll", extra=4000)) == formula_bytes(result("pefll")) + 1000


def test_a_curve_is_the_mean_over_seeds_at_common_rounds():
    short = result("fedavg", 1, rises=0.2)
    del short["validation"][1]
    mean = curve([result("fedavg"), short])
    assert mean.rounds.tolist() == [1, 3, 4]
    assert mean.accuracy["unseen"].tolist() == pytest.approx([15, 45, 60])
    assert mean.gigabytes[-1] == pytest.approx(4 * 2 * 5 * 4 * LENET / 1e9)
    assert curve([]) is None


def test_ahead_at_the_same_budget():
    def line(rounds, gigabytes, seen):
        return Curve(np.array(rounds), np.array(gigabytes), {"seen": np.array(seen)})

    dear, cheap = line([1, 2, 3], [2, 4, 6], [11, 19, 31]), line([1, 2, 3], [1, 2, 3], [10, 20, 30])
    assert [part.tolist() for part in differences(dear, cheap, "rounds", "seen")] == [[1, 2, 3], [1, -1, 1]]
    assert [part.tolist() for part in differences(dear, cheap, "gigabytes", "seen")] == [[2], [-9]]  # 3 GB at most

    def judged(first, second, by, group="seen"):
        return ahead_verdict("text", "place", "where", first, second, by, group)[3:]

    assert judged(dear, cheap, "rounds") == ("67% of budgets", "last behind at 2 rounds", FAILS)
    assert judged(dear, cheap, "gigabytes") == ("0% of budgets", "last behind at 2 GB", FAILS)
    assert judged(cheap, dear, "gigabytes") == ("100% of budgets", "always", HOLDS)
    later = dear._replace(gigabytes=np.array([4, 5, 6]))
    for nothing in (
        judged(None, cheap, "rounds"),
        judged(dear, None, "rounds"),
        judged(dear, cheap, "rounds", "unseen"),
        judged(later, cheap, "gigabytes"),
    ):
        assert nothing == ("", "", NOTHING)


def evidence(*results: dict) -> Evidence:
    found: dict = {}
    for one in results:
        found.setdefault(("PeFLL" if one["method"] == "pefll" else "FedAvg", "cifar10-100"), []).append(one)
    return Evidence(EXPERIMENT, found, (0,), ROUNDS)


def test_statements_and_the_page(tmp_path):
    both = evidence(result("pefll"), result("fedavg", rises=0.03))
    here = [one for one in both.verdicts() if one.where.startswith("CIFAR-10, n=100:")]
    assert [one.word for one in here[:2]] == [HOLDS, HOLDS]
    assert [one.word for one in here[2:]] == [HOLDS] * 4
    assert sum(one.word != NOTHING for one in both.verdicts()) == 6
    worse = evidence(result("pefll", extra=10**7, rises=0.05), result("fedavg"))
    assert [one.word for one in worse.verdicts() if one.word != NOTHING] == [FAILS, HOLDS, *[FAILS] * 4]
    paths = write_page(both, tmp_path)
    assert [path.name for path in paths] == [f"training_cost.{ending}" for ending in ("md", "csv", "png")]
    page = paths[0].read_text()
    assert "| CIFAR-10, n=100 | PeFLL | 1 | 9.91 | 9.91 | 2.04 | 40.0 | 40.0 |" in page
    assert "![training_cost](training_cost.png)" in page
    assert len(write_page(both, tmp_path, figures=False)) == 2
