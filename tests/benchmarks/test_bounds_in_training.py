"""The bounds of a short run beside its unseen clients' error, on digits."""

import json

import pytest

from benchmarks import bounds_in_training


def test_bounds_of_a_short_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bounds_in_training, "SETTINGS", {"local_steps": 1, "hypernetwork": "S", "embedding": "mlp"})
    out = tmp_path / "results" / "bounds.json"
    given = ["--data", "digits", "--partition", "by-class 3", "--clients", "20", "--clients-per-round", "2"]
    given += ["--rounds", "4", "--states", "2", "--out", str(out), "--folder", str(tmp_path / "run")]
    bounds_in_training.main(given)
    record = json.loads(out.read_text())
    assert [point["round"] for point in record["points"]] == [2, 4]
    assert ["query" in point["bounds"] for point in record["points"]] == [False, True]  # round 2 is the prior itself
    assert record["points"][0]["unseen_error"] == record["prior_unseen_error"]
    assert (record["num_seen"], record["num_unseen"]) == (18, 2)
    assert record["command"].endswith(
        "--data digits --partition 'by-class 3' --clients 20 --clients-per-round 2 --rounds 4 --states 2 --seed 0"
    )
    page = out.with_suffix(".md").read_text()
    (query,) = [one for one in record["statements"] if one["name"] == "query"]
    assert f"| query | {query['measured']:.3f} | {query['bound']:.4g} | {query['promise']} |" in page
    assert page.startswith("# Bounds during training: digits, by-class 3, 20 clients, 4 rounds\n")
    assert f"an error of {record['prior_unseen_error']:.3f} on unseen clients" in page
    assert out.with_suffix(".png").stat().st_size > 5_000
