"""The demo, made small."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.experiments import demo
from pefll.runs.personal import PersonalModel
from pefll.runs.record import RunFolder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(demo, "CLIENTS", 20)
    monkeypatch.setattr(demo, "ROUNDS", 4)
    monkeypatch.setattr(demo, "PER_ROUND", 2)
    monkeypatch.setitem(demo.SETTINGS, "local", {"client_lr": 0.02, "epochs": 1})


def test_the_demo_trains_compares_and_personalises(small, tmp_path):
    for _ in range(2):  # a second one replaces the first
        text = io.StringIO()
        demo.demo(tmp_path, 1, Console(file=text, width=2000))
    for word in ("Local", "FedAvg", "PeFLL", "never seen", "Try next"):
        assert word in text.getvalue()
    for name in ("local-0", "fedavg-0", "pefll-0"):
        summary = RunFolder(tmp_path / "runs" / name).summary()
        assert summary["num_unseen"] == 6
        assert summary["accuracy"]["best"]["unseen"] is not None
    model = PersonalModel.load(tmp_path / "new_client.safetensors")
    with np.load(tmp_path / "new_client_later.npz") as later:
        right = int((model.predict(later["x"]) == later["y"]).sum())
        assert f"right on {right} of its {len(later['y'])} later samples" in text.getvalue()
    for picture in ("curves", "descriptors", "clients"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 1000


def test_the_demo_removes_nothing_that_is_not_its_own(small, tmp_path):
    (tmp_path / "runs" / "thesis").mkdir(parents=True)
    with pytest.raises(PefllError, match="PEFLL-X005"):
        demo.demo(tmp_path, 1, Console(file=io.StringIO()))
    assert (tmp_path / "runs" / "thesis").is_dir()
    with pytest.raises(PefllError, match="PEFLL-X004"):
        demo.demo(tmp_path, 0, Console(file=io.StringIO()))
