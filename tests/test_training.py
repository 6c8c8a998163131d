"""What the training loop does, with an engine that only counts."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.signals import Stopped, stop_signals
from pefll.data.samples import VALIDATION
from pefll.engines.cohort import Ledger
from pefll.engines.device_queue import Clock, DeviceFuture, DeviceQueue
from pefll.engines.hardware import TO_READ
from pefll.runs import checkpoint
from pefll.runs.config import Config
from pefll.runs.problem import describe_problem
from pefll.runs.progress import Progress, start_or_resume
from pefll.runs.record import RunFolder
from pefll.training import evaluation, loop, pipeline
from pefll.training.callbacks import ActiveRun, History
from pefll.training.figures import Accuracy, Evaluation
from pefll.training.fitting import fit
from pefll.training.resolve import RunSpec
from pefll.training.round_robin import ScheduledRun, round_robin
from tests.federations import ragged


class State(NamedTuple):
    theta: Tensor


METHOD = SimpleNamespace(local_steps=3, local_epochs=0, batch_size=4, trains_new_clients=False)
_, MODEL = describe_problem(ragged(), "mlp")


class Counting:
    """An engine whose state is the number of rounds done."""

    name = "counting"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.federation, self.clients_per_round = ragged(), 2
        self.calls: list[tuple[int, int]] = []

    def start(self) -> State:
        return State(torch.zeros(1))

    def advance(self, server: State, first: int, rounds: int) -> State:
        assert float(server.theta) == first
        self.calls.append((first, rounds))
        self.ledger.up += rounds
        return State(server.theta + rounds)


def ready(value: object) -> DeviceFuture:
    return Clock(torch.device("cpu")).future(torch.empty(0), lambda _: value)


def scripted(monkeypatch, values: dict[int, tuple[float, float] | None]) -> list[int]:
    """Let validation accuracy follow a script: round to (seen, unseen); return the splits that were looked at."""
    looked = []

    class Fake:
        def __init__(self, engine, method, split, share):
            self.split = split

        def begin(self, server):
            looked.append(self.split)
            pair = values[int(server.theta)]
            groups = [None, None] if pair is None else [Accuracy(v, 1 - v, 1.0, 1.0, 0.0) for v in pair]
            return ready(Evaluation(*groups))

    monkeypatch.setattr(pipeline, "Evaluator", Fake)
    return looked


def run_loop(
    config: Config, folder: RunFolder | None = None, engine: Counting | None = None, callbacks: tuple = ()
) -> Progress:
    engine = engine or Counting()
    spec = RunSpec(config, engine.federation, "mlp", MODEL, METHOD, TO_READ, engine.clients_per_round, folder)
    run, told = ActiveRun(spec), [History(), *callbacks]
    progress, run.history = start_or_resume(engine, config, folder, lambda sentence: None)
    with stop_signals() as asked_to_stop:
        turns = loop.train(engine, run, progress, told, lambda sentence: None, asked_to_stop)
        (outcome,) = round_robin([ScheduledRun(turns, nullcontext)])
    if isinstance(outcome, BaseException):
        raise outcome
    return progress


def test_the_best_round_is_the_first_with_the_best_seen_validation_accuracy(monkeypatch):
    looked = scripted(monkeypatch, {10: (0.2, 0.9), 20: (0.6, 0.8), 30: (0.6, 1.0), 40: (0.5, 1.0)})
    progress = run_loop(Config(rounds=40, eval_every=10))
    assert (progress.best_round, progress.best_value) == (20, 0.6)
    assert float(progress.best.theta) == 20
    assert float(progress.server.theta) == 40
    assert looked == [VALIDATION] * 4


def test_the_last_round_is_always_evaluated(monkeypatch):
    scripted(monkeypatch, {10: (0.2, 0.9), 20: (0.3, 0.8), 25: (0.9, 0.0)})
    progress = run_loop(Config(rounds=25, eval_every=10))
    assert progress.best_round == 25


@pytest.mark.parametrize("at_25", [0.9, 0.1])
def test_an_extended_run_forgets_an_evaluation_that_only_its_end_asked_for(monkeypatch, tmp_path, at_25):
    scripted(monkeypatch, {10: (0.2, 0), 20: (0.3, 0), 25: (at_25, 0), 30: (0.5, 0), 40: (0.4, 0), 45: (0.4, 0)})
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    progress = run_loop(Config(rounds=25, eval_every=10), folder)
    assert progress.best_round == (25 if at_25 == 0.9 else 20)
    assert [row["round"] for row in folder.history()] == [10, 20, 25]
    progress = run_loop(Config(rounds=45, eval_every=10), folder)
    assert (progress.best_round, progress.best_value, float(progress.best.theta)) == (30, 0.5, 30)
    assert [row["round"] for row in folder.history()] == [10, 20, 30, 40, 45]


def test_without_validation_samples_the_last_round_is_best(monkeypatch):
    scripted(monkeypatch, {10: None, 20: None, 30: None})
    progress = run_loop(Config(rounds=30, eval_every=10))
    assert progress.best_round == 30
    assert float(progress.best.theta) == 30


def test_chunks_end_where_something_is_due(monkeypatch, tmp_path):
    scripted(monkeypatch, dict.fromkeys(range(0, 101, 10), (0.5, 0.5)))
    (tmp_path / "r").mkdir()
    engine, saved = Counting(), []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda folder, t, *rest: saved.append(t) or save(folder, t, *rest))
    run_loop(Config(rounds=100, eval_every=20, checkpoint_every=30), RunFolder(tmp_path / "r"), engine)
    assert saved == [30, 60, 90, 100]
    assert [row["round"] for row in RunFolder(tmp_path / "r").history()] == [20, 40, 60, 80, 100]
    done = 0
    for first, rounds in engine.calls:
        assert first == done
        done += rounds
        assert first // 20 == (done - 1) // 20
        assert first // 30 == (done - 1) // 30
    assert done == 100
    assert len(engine.calls) < 40  # and they grow


def test_a_checkpoint_is_also_made_by_the_clock(monkeypatch, tmp_path):
    scripted(monkeypatch, dict.fromkeys(range(101), (0.5, 0.5)))
    run_loop(Config(rounds=20, eval_every=5, checkpoint_minutes=1e-12), RunFolder(tmp_path))
    assert len(list((tmp_path / "checkpoints").iterdir())) == checkpoint.KEEP


@pytest.mark.parametrize(("each", "wanted"), [(400, [1, 2, 3, 4, 5, 6]), (200, [2, 4, 6]), (100, [4, 6])])
def test_no_more_than_five_minutes_and_a_round_are_lost(monkeypatch, tmp_path, each, wanted):
    scripted(monkeypatch, dict.fromkeys(range(7), (0.5, 0.5)))
    now, saved, save = [0.0], [], checkpoint.save
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pipeline, "STRETCH_SECONDS", 0.0)  # a round at a time
    monkeypatch.setattr(checkpoint, "save", lambda folder, t, *rest: saved.append(t) or save(folder, t, *rest))

    class Slow(Counting):
        def advance(self, server, first, rounds):
            now[0] += each * rounds
            return super().advance(server, first, rounds)

    run_loop(Config(rounds=6, eval_every=100), RunFolder(tmp_path), Slow())
    assert saved == wanted


def test_the_ledger_and_the_best_are_resumed(monkeypatch, tmp_path):
    scripted(monkeypatch, {10: (0.7, 0.9), 20: (0.6, 0.8), 30: (0.65, 0.1)})
    run_loop(Config(rounds=20, eval_every=10), RunFolder(tmp_path))
    engine = Counting()
    progress = run_loop(Config(rounds=30, eval_every=10), RunFolder(tmp_path), engine)
    assert (progress.best_round, progress.best_value, float(progress.best.theta)) == (10, 0.7, 10)
    assert engine.calls[0][0] == 20
    assert engine.ledger.up == 30


class Waited:
    """An answer that is never there before somebody waits for it, as a busy GPU's."""

    seconds = 0.01

    def __init__(self, answer, waited: list, name: object) -> None:
        self.answer, self.waited, self.name = answer, waited, name

    def done(self) -> bool:
        return self.name in self.waited

    def wait(self):
        self.waited.append(self.name)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Busy(Counting):
    """An engine that works on while others do something else; its states all lie in the same memory."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.theta, self.bad = torch.zeros(1), bad
        self.log: list = []
        self.queue = BusyQueue(self)

    def launch(self, server: State, first: int, rounds: int) -> tuple[State, Waited]:
        assert float(server.theta) == first
        self.calls.append((first, rounds))
        self.log.append(("launched", first + rounds))
        self.theta.fill_(first + rounds)
        diverged = self.bad is not None and first + rounds >= self.bad
        return State(self.theta), Waited(PefllError("diverged") if diverged else None, self.log, first + rounds)


class BusyQueue(DeviceQueue):
    works_on = True

    def launch(self, server: State, first: int, rounds: int) -> tuple[State, Waited]:
        return self._engine.launch(server, first, rounds)

    def snapshot(self, server: State) -> State:
        return State(server.theta.clone())


def busy_exams(monkeypatch, engine: Busy, values: dict[int, float]) -> None:
    class Evaluator:
        def __init__(self, *_):
            pass

        def begin(self, server):
            at = int(server.theta)
            result = Evaluation(Accuracy(values.get(at, 0.1), 0.0, 1.0, 1.0, 0.0), None)
            return Waited(result, engine.log, f"exam {at}")

    monkeypatch.setattr(pipeline, "Evaluator", Evaluator)


def test_two_stretches_of_rounds_are_launched_before_an_evaluation_is_waited_for(monkeypatch, tmp_path):
    engine = Busy()
    busy_exams(monkeypatch, engine, {20: 0.9, 30: 0.5})
    config = Config(rounds=50, eval_every=10, checkpoint_every=1000)
    progress = run_loop(config, RunFolder(tmp_path), engine)
    for at in (10, 20, 30):
        _, last = sorted(first + rounds for first, rounds in engine.calls if first + rounds > at)[:2]
        assert engine.log.index(("launched", last)) < engine.log.index(f"exam {at}")
    # And no further ahead than that, in order.
    waiting = 0
    for event in engine.log:
        if isinstance(event, tuple):
            waiting += 1
        elif isinstance(event, int):
            waiting -= 1
        assert waiting <= 3
    assert [row["round"] for row in RunFolder(tmp_path).history()] == [10, 20, 30, 40, 50]
    # The best state is the one that was evaluated, not what became of its memory.
    assert (progress.best_round, float(progress.best.theta)) == (20, 20)
    assert float(progress.server.theta) == 50


def test_a_checkpoint_holds_its_round_and_every_evaluation_until_then(monkeypatch, tmp_path):
    engine = Busy()
    busy_exams(monkeypatch, engine, {10: 0.2, 20: 0.9})
    save, saved = checkpoint.save, []

    def check(folder, round_, tensors, metadata, then, history):
        numbers = float(tensors["server.theta"]), float(tensors["best.theta"]), metadata["progress"]["best_round"]
        launched = [name for name in engine.log if isinstance(name, tuple)][-1][1]
        saved.append((round_, *numbers, launched, [row["round"] for row in RunFolder(tmp_path).history()]))
        return save(folder, round_, tensors, metadata, then, history)

    monkeypatch.setattr(checkpoint, "save", check)
    run_loop(Config(rounds=40, eval_every=10, checkpoint_every=20), RunFolder(tmp_path), engine)
    # While the first is written the engine has more to do, in the same memory.
    assert [entry[:4] for entry in saved] == [(20, 20.0, 20.0, 20), (40, 40.0, 20.0, 20)]
    assert saved[0][4] > 20
    assert saved[0][5][:2] == [10, 20]  # or more by now: the loop goes on
    assert saved[1][5] == [10, 20, 30, 40]


def test_a_busy_engine_goes_on_while_a_checkpoint_is_written_and_one_that_is_not_waits(monkeypatch, tmp_path):
    release, save = threading.Event(), checkpoint.save

    class Launches(Busy):
        def launch(self, server, first, rounds):
            if first >= 22:
                release.set()  # it is well on before the disk is
            return super().launch(server, first, rounds)

    def slow(*given):
        assert release.wait(timeout=60)
        return save(*given)

    engine = Launches()
    busy_exams(monkeypatch, engine, {})
    monkeypatch.setattr(checkpoint, "save", slow)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    run_loop(Config(rounds=40, eval_every=10, checkpoint_every=20), RunFolder(tmp_path / "a"), engine)
    assert checkpoint.latest(tmp_path / "a" / "checkpoints", pytest.fail).round == 40

    engine, calls = Counting(), []
    scripted(monkeypatch, dict.fromkeys(range(0, 41, 10), (0.5, 0.5)))
    monkeypatch.setattr(checkpoint, "save", lambda *given: (time.sleep(0.05), calls.append(len(engine.calls))))
    run_loop(Config(rounds=40, eval_every=10, checkpoint_every=20), RunFolder(tmp_path / "b"), engine)
    until = [sum(first < at for first, _ in engine.calls) for at in (20, 40)]
    assert calls == until  # as a deployment needs it: no round begins before the last one is kept


def test_a_disk_that_is_full_ends_the_run_with_its_sentence(monkeypatch, tmp_path):
    engine = Busy()
    busy_exams(monkeypatch, engine, {})

    def full(*_):
        raise PefllError("cannot write: No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(PefllError, match="No space left"):
        run_loop(Config(rounds=400, eval_every=10, checkpoint_every=20), RunFolder(tmp_path), engine)
    # When the next one is to be written at the latest; other rounds are under way then.
    assert engine.calls[-1][0] <= 50


def test_a_disk_that_is_full_is_noticed_before_the_next_checkpoint(monkeypatch, tmp_path):
    failed = threading.Event()

    class Launches(Busy):
        def launch(self, server, first, rounds):
            assert first < 250 or failed.wait(timeout=60)
            return super().launch(server, first, rounds)

    def full(*_):
        failed.set()
        raise PefllError("cannot write: No space left on device")

    engine = Launches()
    busy_exams(monkeypatch, engine, {})
    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(PefllError, match="No space left"):
        run_loop(Config(rounds=2000, eval_every=10, checkpoint_every=200), RunFolder(tmp_path), engine)
    assert engine.calls[-1][0] < 370


def test_divergence_that_is_noticed_late_leaves_no_evaluation_of_it(monkeypatch, tmp_path):
    engine = Busy(bad=25)
    busy_exams(monkeypatch, engine, {30: 1.0})
    with pytest.raises(PefllError, match="diverged"):
        run_loop(Config(rounds=60, eval_every=10, checkpoint_every=20), RunFolder(tmp_path), engine)
    assert [row["round"] for row in RunFolder(tmp_path).history()] == [10, 20]
    assert checkpoint.latest(tmp_path / "checkpoints", pytest.fail).round == 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_saves_and_puts_handlers_back(monkeypatch, tmp_path, number):
    scripted(monkeypatch, dict.fromkeys(range(0, 101, 10), (0.5, 0.5)))
    before = signal.getsignal(number)

    class Signalled(Counting):
        def advance(self, server, first, rounds):
            if first >= 11:
                os.kill(os.getpid(), number)
            return super().advance(server, first, rounds)

    with pytest.raises(Stopped) as stopped:
        run_loop(Config(rounds=100, eval_every=10), RunFolder(tmp_path), Signalled())
    assert stopped.value.signal == number
    assert 11 < stopped.value.round < 100
    assert checkpoint.latest(tmp_path / "checkpoints", pytest.fail).round == stopped.value.round
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once(monkeypatch):
    scripted(monkeypatch, dict.fromkeys(range(0, 101, 10), (0.5, 0.5)))

    class Impatient(Counting):
        def advance(self, server, first, rounds):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second one should not come back")

    with pytest.raises(KeyboardInterrupt):
        run_loop(Config(rounds=100, eval_every=10), None, Impatient())


def test_training_works_outside_of_the_main_thread():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(
            lambda: fit(ragged(), "fedavg", rounds=2, clients_per_round=2, local_steps=1, processes=1)
        ).result()
    assert run.summary["rounds"] == 2


def test_evaluations_use_a_quarter_of_the_samples_trained_on_between_them():
    engine = SimpleNamespace(federation=ragged(clients=40, sizes=(60,)), clients_per_round=2)  # 60 + 21 samples each
    method = SimpleNamespace(local_steps=5, local_epochs=0, batch_size=8)
    assert evaluation.evaluated_share(engine, method, Config(eval_every=10)) == pytest.approx(0.25 * 800 / (40 * 81))
    assert evaluation.evaluated_share(engine, method, Config(eval_every=1000)) == 1.0
    assert evaluation.evaluated_share(engine, method, Config(eval_every=10, eval_clients=10)) == 0.25
    whole = SimpleNamespace(local_steps=5, local_epochs=0, batch_size=0)
    assert evaluation.evaluated_share(engine, whole, Config(eval_every=2)) == pytest.approx(0.25 * 20 / 40)
    epochs = SimpleNamespace(local_steps=0, local_epochs=3, batch_size=8)
    assert evaluation.evaluated_share(engine, epochs, Config(eval_every=2)) == pytest.approx(0.25 * 12 / 40)
    assert loop.local_steps(epochs, engine.federation) == 3 * 8  # 60 samples are 8 batches
    assert loop.local_steps(method, engine.federation) == 5
