"""Regression on raw tables: what both mean together."""

from __future__ import annotations

import numpy as np
import pytest

import pefll
from pefll.core.errors import PefllError
from pefll.report.descriptors import read_descriptors
from pefll.runs.record import RunFolder

pd = pytest.importorskip("pandas")


def prices(seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"user": np.repeat([f"u{i}" for i in range(8)], 12), "a": rng.normal(size=96)})
    return frame.assign(colour=rng.choice(["red", "green"], 96), price=100 * frame.a + rng.normal(size=96))


QUICK_REGRESSION = {"rounds": 2, "processes": 1, "local_steps": 2}


def test_a_regression_on_a_raw_table_is_shown_and_predicted(tmp_path):
    federation = pefll.federation_from_frame(prices(), "price", "user", unseen=0.25)
    run = pefll.fit(federation, "pefll", out=tmp_path / "run", **QUICK_REGRESSION)
    frame = run.predictions().frame()
    assert frame.label.dtype.kind == "f"
    assert read_descriptors(RunFolder(tmp_path / "run")).class_names == ()
    # Another table has another plan, which would silently mean other inputs.
    other = pefll.federation_from_frame(prices().assign(a=50 * prices().a + 9000), "price", "user", unseen=0.25)
    for evaluate in (run.evaluate, run.predictions):
        with pytest.raises(PefllError, match="PEFLL-T580"):
            evaluate(federation=other)
    assert pefll.load(tmp_path / "run").evaluate(federation=federation) == run.evaluate()
    # The plan belongs to the fingerprint: renamed columns are other data.
    renamed = pefll.federation_from_frame(prices().rename(columns={"a": "b"}), "price", "user", unseen=0.25)
    assert renamed.fingerprint() != federation.fingerprint()


def test_labels_that_float32_cannot_tell_apart_are_refused():
    with pytest.raises(PefllError, match="PEFLL-D588"):
        pefll.federation_from_frame(prices().assign(price=prices().price + 1e12), "price", "user")


def test_a_metric_that_is_not_finite_is_named():
    frame = prices()
    frame.loc[::4, "price"] = 0.0
    federation = pefll.federation_from_frame(frame, "price", "user", unseen=0.25)
    ratio = pefll.Metric("ratio", lambda output, y: (output[:, 0] - y).abs() / y.abs())
    with pytest.raises(PefllError, match=r"'ratio'.*PEFLL-T582"):
        pefll.fit(federation, "fedavg", task=pefll.Regression(extra=[ratio]), **QUICK_REGRESSION)
