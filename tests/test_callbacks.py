"""Callbacks: who is told what, in which order, and who may end a run."""

from __future__ import annotations

import dataclasses
import signal

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.runs.claim import finished_state
from pefll.runs.config import Config
from pefll.runs.record import RunFolder
from pefll.training.callbacks import Guarded
from tests.federations import flat, ragged
from tests.test_training import Busy, Counting, busy_exams, run_loop, scripted

QUICK = {
    "clients_per_round": 2,
    "local_steps": 1,
    "eval_every": 2,
    "checkpoint_every": 4,
    "processes": 1,
}


class Told(pefll.Callback):
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def on_start(self, run):
        self.calls.append(("start", run.spec.config.seed, run.round, len(run.history)))

    def on_evaluation(self, run, row):
        assert run.history[-1] == row
        assert run.round == row["round"]
        self.calls.append(("evaluation", run.spec.config.seed, row["round"]))

    def on_checkpoint(self, run, round_):
        assert (run.spec.folder.checkpoints / f"round-{round_:08d}").is_dir()
        self.calls.append(("checkpoint", run.spec.config.seed, round_))

    def on_end(self, run):
        self.calls.append(("end", run.spec.config.seed, run.summary.get("rounds")))


class Stop(pefll.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_evaluation(self, run, row):
        return row["round"] >= self.at


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_what_a_callback_is_told(tmp_path, engine):
    told = Told()
    run = pefll.fit(ragged(), "fedavg", rounds=6, out=tmp_path, engine=engine, callbacks=[told], **QUICK)
    evaluations = [call for call in told.calls if call[0] == "evaluation"]
    assert evaluations == [("evaluation", 0, 2), ("evaluation", 0, 4), ("evaluation", 0, 6)]
    assert [call for call in told.calls if call[0] == "checkpoint"] == [("checkpoint", 0, 4), ("checkpoint", 0, 6)]
    assert told.calls[0] == ("start", 0, 0, 0)
    assert told.calls[-1] == ("end", 0, 6)
    told.calls.clear()
    longer = pefll.fit(ragged(), "fedavg", rounds=8, out=tmp_path, engine=engine, callbacks=[told], **QUICK)
    assert told.calls[0] == ("start", 0, 6, 3)
    assert longer.history[:3] == run.history


def test_runs_at_once_share_their_callbacks():
    told = Told()
    pefll.fit_seeds(ragged(), "fedavg", seeds=[3, 4], rounds=2, callbacks=[told], **QUICK)
    for seed in (3, 4):
        mine = [call for call in told.calls if call[1] == seed]
        assert mine == [("start", seed, 0, 0), ("evaluation", seed, 2), ("end", seed, 2)]


def test_the_end_is_told_also_where_a_run_fails_or_is_stopped():
    told = Told()
    wild = QUICK | {"client_lr": 1e30, "client_clip": 0.0}
    with pytest.raises(PefllError, match="PEFLL-E012"):
        pefll.fit(ragged(), "fedavg", rounds=6, callbacks=[told], **wild)
    assert told.calls[-1] == ("end", 0, None)

    class CtrlC(pefll.Callback):
        def on_evaluation(self, run, row):
            signal.raise_signal(signal.SIGINT)

    told.calls.clear()
    with pytest.raises(pefll.Stopped):
        pefll.fit(ragged(), "fedavg", rounds=6, callbacks=[told, CtrlC()], **QUICK)
    assert told.calls == [("start", 0, 0, 0), ("evaluation", 0, 2), ("end", 0, None)]


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_a_run_that_a_callback_ends_is_a_shorter_run(tmp_path, engine):
    told = Told()
    settings = QUICK | {"engine": engine}
    run = pefll.fit(ragged(), "fedavg", rounds=20, out=tmp_path / "a", callbacks=[Stop(4), told], **settings)
    short = pefll.fit(ragged(), "fedavg", rounds=4, **settings)
    assert (run.summary["rounds"], run.summary["stopped"]) == (4, {"by": "Stop", "rounds": 20, "after_round": 4})
    assert "stopped" not in short.summary
    assert torch.equal(flat(run.final), flat(short.final))
    assert torch.equal(flat(run.server), flat(short.server))
    assert run.summary["accuracy"] == short.summary["accuracy"]
    assert run.summary["bytes_up"] == short.summary["bytes_up"]
    assert told.calls[-2:] == [("checkpoint", 0, 4), ("end", 0, 4)]
    # It is finished: nothing is done again, with or without the callback. More rounds go on with it.
    assert finished_state(RunFolder(tmp_path / "a"), 20) is not None
    assert pefll.fit(ragged(), "fedavg", rounds=20, out=tmp_path / "a", **settings).summary == run.summary
    assert pefll.load(tmp_path / "a").history == run.history
    longer = pefll.fit(ragged(), "fedavg", rounds=21, out=tmp_path / "a", **settings)
    whole = pefll.fit(ragged(), "fedavg", rounds=21, out=tmp_path / "b", **settings)
    assert torch.equal(flat(longer.final), flat(whole.final))
    assert "stopped" not in longer.summary


class Breaks(pefll.Callback):
    """Fails at the second call of one event."""

    def __init__(self, event: str, error: Exception, at: int = 2) -> None:
        self.calls, self.error, self.at = 0, error, at
        setattr(self, event, self.count)

    def count(self, run, *rest):
        self.calls += 1
        if self.calls == self.at:
            raise self.error


def test_one_round_is_saved_and_two_are(tmp_path):
    class Fails(pefll.Callback):
        def on_evaluation(self, run, row):
            raise ValueError

    for rounds, words in ((1, "its 1 round is saved"), (2, "its 2 rounds are saved")):
        with pytest.raises(PefllError, match=words):
            pefll.fit(
                ragged(), "fedavg", rounds=4, out=tmp_path / str(rounds), callbacks=[Fails()],
                **QUICK | {"eval_every": rounds, "engine": "serial"},
            )  # fmt: skip


@pytest.mark.parametrize(
    ("event", "engine", "error", "code"),
    [
        ("on_evaluation", "serial", ValueError("bad row"), "PEFLL-T550"),
        ("on_evaluation", "vector", PefllError("no more disk", code="PEFLL-A102"), "PEFLL-A102"),
        ("on_rounds", "serial", KeyError("row"), "PEFLL-T550"),
    ],
)
def test_a_run_whose_callback_fails_is_saved_and_goes_on_later(tmp_path, event, engine, error, code):
    broken, other, settings = Breaks(event, error), Told(), QUICK | {"engine": engine, "checkpoint_every": 100}
    with pytest.raises(PefllError, match=rf"the callback Breaks failed in {event}: .*{code}\]") as failed:
        pefll.fit(ragged(), "fedavg", rounds=10, out=tmp_path, callbacks=[broken, other], **settings)
    assert broken.calls == 2
    saved = int(max((tmp_path / "checkpoints").iterdir()).name[-8:])
    assert f"its {saved} rounds are saved" in str(failed.value)
    assert 2 <= saved < 10
    assert other.calls[-1] == ("end", 0, None)
    again = pefll.fit(ragged(), "fedavg", rounds=10, out=tmp_path, **settings)
    whole = pefll.fit(ragged(), "fedavg", rounds=10, **settings)
    assert torch.equal(flat(again.final), flat(whole.final))
    assert [row["round"] for row in again.history] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("answer", [0.93, np.array([True, False]), "stop", (one for one in "a")])
def test_what_is_no_answer_ends_the_run_as_an_error(tmp_path, answer):
    class Answers(pefll.Callback):
        def on_evaluation(self, run, row):
            return answer

    with pytest.raises(PefllError, match=r"Answers failed in on_evaluation: TypeError: it returned .*only True ends"):
        pefll.fit(ragged(), "fedavg", rounds=6, out=tmp_path, callbacks=[Answers()], **QUICK | {"engine": "serial"})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round-00000002"]


@pytest.mark.parametrize(("answer", "last"), [(np.bool_(True), 2), (torch.tensor(True), 2), (torch.tensor(False), 6)])
def test_true_is_true_of_numpy_and_torch_too(answer, last):
    class Answers(pefll.Callback):
        def on_evaluation(self, run, row):
            return answer

    run = pefll.fit(ragged(), "fedavg", rounds=6, callbacks=[Answers()], **QUICK | {"engine": "serial"})
    assert run.history[-1]["round"] == last


def test_a_callback_cannot_change_the_history(tmp_path):
    class Clears(pefll.Callback):
        def on_evaluation(self, run, row):
            row["seen"].clear()
            row.clear()

    plain = pefll.fit(ragged(), "fedavg", rounds=4, **QUICK)
    run = pefll.fit(ragged(), "fedavg", rounds=4, out=tmp_path, callbacks=[Clears()], **QUICK)
    assert [row["seen"] for row in run.history] == [row["seen"] for row in plain.history]


def test_a_callback_that_exits_is_saved_and_named_in_one_line(tmp_path):
    """Messages of several lines or of none stay one sentence."""
    for place, (error, said) in enumerate(
        (
            (SystemExit(3), r"SystemExit in .*: 3; its 2 rounds are saved"),
            (ValueError("first\nsecond"), r"ValueError in .*: first; its 2 rounds"),
            (ValueError(), r"ValueError in .*, line \d+; its 2 rounds"),
        )
    ):
        folder = tmp_path / str(place)
        with pytest.raises(PefllError, match=rf"Breaks failed in on_evaluation: {said}"):
            pefll.fit(
                *(ragged(), "fedavg"), rounds=4, out=folder, callbacks=[Breaks("on_evaluation", error, at=1)], **QUICK
            )
        assert list((folder / "checkpoints").glob("round-*"))


def test_a_callback_that_fails_at_the_start_or_at_the_end(tmp_path):
    for event, place in (("on_start", "a"), ("on_end", "b"), ("on_checkpoint", "c")):
        broken = Breaks(event, RuntimeError("no"), at=1)
        with pytest.raises(PefllError, match=rf"Breaks failed in {event}: .*PEFLL-T550"):
            pefll.fit(ragged(), "fedavg", rounds=4, out=tmp_path / place, callbacks=[broken], **QUICK)
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["round-00000000"]
    assert finished_state(RunFolder(tmp_path / "b"), 4) is not None
    assert pefll.load(tmp_path / "b").summary["rounds"] == 4
    assert list((tmp_path / "c" / "checkpoints").glob("round-00000004"))


def test_a_callback_that_fails_for_one_seed_leaves_the_others(tmp_path):
    class OneSeed(pefll.Callback):
        def on_evaluation(self, run, row):
            if run.spec.config.seed == 1:
                raise ValueError("this seed")

    with pytest.raises(pefll.RunsFailed, match=r"1 of 2 runs failed: seed 1: .*OneSeed") as failed:
        pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], rounds=4, out=tmp_path, callbacks=[OneSeed()], **QUICK)
    assert [run.config.seed for run in failed.value.runs] == [0]
    assert list((tmp_path / "seed-1" / "checkpoints").glob("round-*"))


def test_a_busy_engine_that_ends_for_a_callback_is_saved_with_its_last_round(monkeypatch, tmp_path):
    """Rounds that were launched before the failure are part of the run."""
    engine = Busy()
    busy_exams(monkeypatch, engine, {})
    folder = RunFolder(tmp_path)
    with pytest.raises(PefllError, match="PEFLL-T550"):
        run_loop(Config(rounds=500, eval_every=10), folder, engine, (Guarded(Breaks("on_evaluation", KeyError(1))),))
    (saved,) = (path.name for path in (tmp_path / "checkpoints").iterdir())
    last = max(first + rounds for first, rounds in engine.calls)
    assert saved == f"round-{last:08d}"
    assert 20 <= last < 500


def test_a_busy_engine_ends_with_the_round_that_was_evaluated(monkeypatch, tmp_path):
    """Rounds after it are under way by then, in the same memory."""
    engine = Busy()
    busy_exams(monkeypatch, engine, {})
    config = Config(rounds=50, eval_every=10)
    progress = run_loop(config, RunFolder(tmp_path), engine, (Stop(20),))
    assert max(first + rounds for first, rounds in engine.calls) > 20
    assert (progress.round, float(progress.server.theta)) == (20, 20)
    assert [row["round"] for row in RunFolder(tmp_path).history()] == [10, 20]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round-00000020"]


def test_a_callback_that_wants_to_stop_after_the_last_round_changes_nothing():
    run = pefll.fit(ragged(), "fedavg", rounds=4, callbacks=[Stop(4)], **QUICK)
    assert "stopped" not in run.summary


def ended(monkeypatch, values: list[float], stopping: pefll.EarlyStopping, folder: RunFolder | None = None) -> int:
    scripted(monkeypatch, {10 * (place + 1): (value, 1 - value) for place, value in enumerate(values)})
    config = Config(rounds=10 * len(values), eval_every=10)
    return run_loop(config, folder, Counting(), (stopping,)).round


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"patience": 1}, 20),
        ({"patience": 2}, 50),
        ({"patience": 3, "metric": "accuracy"}, 60),  # another name of per_sample
        ({"patience": 5}, 70),  # all of them: too few are left
        ({"patience": 2, "min_delta": 0.15}, 30),  # 0.4 is no better than 0.3
        ({"patience": 2, "group": "unseen"}, 40),  # theirs is 1 - value: best at 20
        ({"patience": 2, "metric": "per_client"}, 40),  # likewise
        ({"patience": 2, "metric": "loss"}, 30),  # 0 everywhere
    ],
)
def test_a_run_that_does_not_get_better_is_ended(monkeypatch, settings, wanted):
    values = [0.3, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4]
    assert ended(monkeypatch, values, pefll.EarlyStopping(**settings)) == wanted


def test_a_resumed_run_ends_where_one_in_one_go_does(monkeypatch, tmp_path):
    values = [0.3, 0.5, 0.4, 0.4, 0.4, 0.4]
    assert ended(monkeypatch, values, pefll.EarlyStopping(3)) == 50
    config = Config(rounds=30, eval_every=10)
    run_loop(config, RunFolder(tmp_path), Counting())
    assert ended(monkeypatch, values, pefll.EarlyStopping(3), RunFolder(tmp_path)) == 50


@pytest.mark.parametrize("when", ["on_evaluation", "on_checkpoint"])
def test_a_stopped_run_that_is_interrupted_before_its_test_does_not_train_on(tmp_path, when):
    """The signal comes during the evaluation that stops the run, or the checkpoint after it, so before the test."""

    class Interrupts(pefll.Callback):
        def on_evaluation(self, run, row):
            if row["round"] == 4 and when == "on_evaluation":
                signal.raise_signal(signal.SIGINT)

        def on_checkpoint(self, run, round_):
            if round_ == 4 and when == "on_checkpoint":
                signal.raise_signal(signal.SIGINT)

    settings = {"rounds": 6, "eval_every": 2, "out": tmp_path / "a"} | {
        name: value for name, value in QUICK.items() if name not in ("rounds", "eval_every")
    }
    with pytest.raises(pefll.Stopped, match="in the test after round 4"):
        pefll.fit(ragged(), "fedavg", callbacks=[Stop(4), Interrupts()], **settings)
    run = pefll.fit(ragged(), "fedavg", callbacks=[Stop(4)], **settings)
    assert (run.summary["rounds"], run.summary["stopped"]) == (4, {"by": "Stop", "rounds": 6, "after_round": 4})
    whole = pefll.fit(ragged(), "fedavg", callbacks=[Stop(4)], **settings | {"out": tmp_path / "b"})
    assert run.summary["accuracy"] == whole.summary["accuracy"]
    longer = pefll.fit(ragged(), "fedavg", **settings | {"rounds": 8})
    assert longer.summary["rounds"] == 8
    assert "stopped" not in longer.summary


def test_without_validation_samples_nobody_stops_early(monkeypatch):
    scripted(monkeypatch, dict.fromkeys(range(0, 51, 10)))
    config = Config(rounds=50, eval_every=10)
    assert run_loop(config, None, Counting(), (pefll.EarlyStopping(1),)).round == 50


@pytest.mark.parametrize(
    ("method", "group", "seen", "why"),
    [
        ("fedper", "unseen", 6, "this method trains new clients.*choose group='seen'"),
        ("fedavg", "unseen", 8, "there are none"),
        ("fedavg", "seen", 6, "none of them has validation samples; leave it out"),
    ],
)
def test_early_stopping_of_clients_that_are_not_evaluated(tmp_path, method, group, seen, why):
    data = ragged(seen=seen)
    if group == "seen":
        data = dataclasses.replace(data, count=data.count * torch.tensor([[1], [0], [1]]))
    stopping = pefll.EarlyStopping(1, group=group)
    with pytest.raises(PefllError, match=rf"{why}.*PEFLL-T660"):
        pefll.fit(data, method, rounds=2, out=tmp_path / "r", callbacks=[stopping], **QUICK)
    assert not (tmp_path / "r").exists()


def test_a_misspelt_event_is_refused():
    class Misspelt(Stop):
        def on_eval(self, run, row):
            pytest.fail("it is no event")

    with pytest.raises(PefllError, match=r"Misspelt has on_eval.*did you mean on_evaluation\?.*PEFLL-T661"):
        pefll.fit(ragged(), "fedavg", rounds=2, callbacks=[Misspelt(1)], **QUICK)


def test_an_active_run_is_shown_in_a_line(capsys):
    class Show(pefll.Callback):
        def on_end(self, run):
            print(run)

    pefll.fit(ragged(), "fedavg", rounds=2, callbacks=[Show()], **QUICK)
    assert capsys.readouterr().out == "<ActiveRun 'fedavg seed 0', round 2 of 2>\n"


def test_what_early_stopping_and_fit_refuse(tmp_path):
    told = Told()
    for wrong, hint in (("rmse", "per_sample"), ("per-sample", "did you mean 'per_sample'")):
        stopping = pefll.EarlyStopping(metric=wrong)
        with pytest.raises(PefllError, match=rf"metric '{wrong}'.*{hint}.*PEFLL-A101"):
            pefll.fit(ragged(), "fedavg", rounds=2, out=tmp_path / "r", callbacks=[told, stopping], **QUICK)
    assert told.calls == []
    assert not (tmp_path / "r").exists()
    with pytest.raises(PefllError, match=r"group 'all'.*PEFLL-A101"):
        pefll.EarlyStopping(group="all")
    with pytest.raises(PefllError, match="PEFLL-A"):
        pefll.EarlyStopping(0)
    for wrong, code in (("a", "A004"), (None, "A004"), (float("nan"), "A005"), (float("inf"), "A005"), (-0.1, "T662")):
        with pytest.raises(PefllError, match=rf"min_delta is .*; it .*PEFLL-{code}"):
            pefll.EarlyStopping(min_delta=wrong)
    for wrong in ([pefll.EarlyStopping], [print], pefll.EarlyStopping(), "history"):
        with pytest.raises(PefllError, match=r"PEFLL-(T127|A011)"):
            pefll.fit(ragged(), "fedavg", rounds=2, callbacks=wrong, **QUICK)


def test_a_run_has_its_history_with_and_without_a_folder(tmp_path):
    alone = pefll.fit(ragged(), "fedavg", rounds=5, **QUICK)
    kept = pefll.fit(ragged(), "fedavg", rounds=5, out=tmp_path, **QUICK)
    assert [row["round"] for row in alone.history] == [2, 4, 5]
    assert kept.history == RunFolder(tmp_path).history() == pefll.load(tmp_path).history
    assert pefll.fit(ragged(), "fedavg", rounds=5, out=tmp_path, **QUICK).history == kept.history
    for mine, theirs in zip(alone.history, kept.history, strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}
    RunFolder(tmp_path).history_file.write_text("nonsense\n")
    with pytest.warns(UserWarning, match=r"history\.jsonl is damaged"):
        assert pefll.load(tmp_path).history == []
