"""The number of settings that were tried for each method, beside Table 1."""

from __future__ import annotations

import json

from pefll.experiments.comparison import compare, write_tables
from pefll.experiments.searched import searches
from pefll.experiments.table1 import CELLS

POINTS = [({"client_lr": 0.1}, 0), ({"client_lr": 0.1}, 1), ({"client_lr": 0.2, "epochs": 3}, 0)]


def test_different_settings_are_counted_with_and_without_held_out_clients(tmp_path):
    tuned = tmp_path / "tune"
    tuned.mkdir()
    trials = [{"settings": point, "seed": seed} for point, seed in POINTS]
    (tuned / "cifar10-fedavg-n100.json").write_text(json.dumps({"best": None, "trials": trials}))
    more = [{"settings": {"epochs": 3, "client_lr": 0.2}, "seed": 5}, {"settings": {"client_lr": 0.3}, "seed": 0}]
    (tuned / "cifar10-fedavg-n100-holding-out-0.1.json").write_text(json.dumps({"best": None, "trials": more}))
    (tuned / "cifar10-per-fedavg-n100.json").write_text(json.dumps({"best": None, "trials": trials[:1]}))
    assert searches("fedavg", CELLS[0], tuned) == (3, 5)
    assert [str(searches(method, CELLS[0], tuned)) for method in ("fedavg", "per-fedavg")] == ["3 (5 runs)", "1"]
    assert searches("fedavg", CELLS[2], tuned) == (0, 0)  # n=1000: its name begins as that of n=100
    text = write_tables(compare({}, CELLS[:2], 5000, range(2)), tmp_path)[0].read_text()
    assert "| FedAvg | 3 (5 runs) | — |" in text
    assert "tried" not in write_tables(compare({}, CELLS[:2], 5000, range(2)), tmp_path / "none")[0].read_text()
