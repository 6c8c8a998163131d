"""TensorBoard's events, read back by TensorBoard itself."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

import pefll
from pefll.core.errors import PefllError
from tests.federations import ragged

QUICK = {"rounds": 4, "eval_every": 2, "clients_per_round": 2, "local_steps": 1, "processes": 1}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        found = accumulator.EventAccumulator(str(folder))
        found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_evaluations_come_back_also_those_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    for rounds in (4, 6):
        out = tmp_path / "run"
        run = pefll.fit(ragged(), "fedavg", out=out, callbacks=[pefll.TensorBoard()], **QUICK | {"rounds": rounds})
    found = scalars(tmp_path / "run")
    assert len(found) == 2 * len(pefll.Accuracy._fields)
    for group in ("seen", "unseen"):
        wanted = [(row["round"], pytest.approx(row[group]["loss"], rel=1e-6)) for row in run.history]
        assert found[f"validation/{group}/loss"] == wanted
    assert [step for step, _ in found["validation/seen/per_sample"]] == [2, 4, 6]


def test_several_runs_have_folders_of_their_own(tmp_path):
    pytest.importorskip("tensorboard")
    with pytest.raises(PefllError, match="PEFLL-T129"):
        pefll.fit(ragged(), "fedavg", callbacks=[pefll.TensorBoard()], **QUICK)
    board = pefll.TensorBoard(tmp_path / "events")
    runs = pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], callbacks=[board], **QUICK)
    for seed, run in enumerate(runs):
        found = scalars(tmp_path / "events" / f"fedavg-seed-{seed}")
        last = run.history[-1]
        assert found["validation/seen/loss"][-1] == (last["round"], pytest.approx(last["seen"]["loss"], rel=1e-6))


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(PefllError, match="PEFLL-A102"):
        pefll.fit(ragged(), "fedavg", callbacks=[pefll.TensorBoard(tmp_path / "file")], **QUICK)


def test_without_the_package_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PefllError, match=r"pip install tensorboard \[PEFLL-T130\]"):
        pefll.TensorBoard()


def test_a_full_disk_ends_the_events_but_not_the_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    add = SummaryWriter.add_scalar

    def fail_later(self, tag, scalar_value, global_step=None, **more):
        if global_step > 2:
            raise OSError(28, "No space left on device")
        return add(self, tag, scalar_value, global_step, **more)

    monkeypatch.setattr(SummaryWriter, "add_scalar", fail_later)
    with pytest.warns(UserWarning, match=r"TensorBoard stopped after round 4, and the run goes on: .*No space left"):
        run = pefll.fit(ragged(), "fedavg", out=tmp_path, callbacks=[pefll.TensorBoard()], **QUICK | {"rounds": 6})
    assert [row["round"] for row in run.history] == [2, 4, 6]
    assert [step for step, _ in scalars(tmp_path)["validation/seen/loss"]] == [2]
