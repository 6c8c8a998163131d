"""A run that is stopped, killed, resumed or extended ends as one that was not."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pefll import checkpoint, cli, training
from pefll.config import Config
from pefll.data.federation import VALIDATION
from pefll.engines.cohort import Ledger
from pefll.engines.later import Clock, Later
from pefll.errors import PefllError
from pefll.evaluation import Accuracy, Evaluation
from pefll.fitting import fit
from pefll.lockstep import Job, stop_signals, take_turns
from pefll.progress import Silent
from pefll.record import RunFolder
from pefll.run import load
from tests.federations import flat, ragged

ROUNDS, EVERY = 80, 20
TRAIN = (
    f"--data digits --clients 8 --model mlp --rounds {ROUNDS} --clients-per-round 2 --eval-every {EVERY} "
    "--checkpoint-every 10 --engine serial --set hypernetwork=S --set local_steps=2 --set embedding=linear --seed 3"
).split()


def main(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["pefll", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


def fingerprint(run: Path) -> tuple[int, str]:
    """The round and a SHA-256 over all tensors of the newest checkpoint."""
    saved = checkpoint.latest(run / "checkpoints", pytest.fail)
    digest = hashlib.sha256()
    assert {name.partition(".")[0] for name in saved.tensors} == {"server", "best"}
    for name in sorted(saved.tensors):
        digest.update(name.encode() + saved.tensors[name].numpy().tobytes())
    return saved.round, digest.hexdigest()


def without_seconds(run: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in RunFolder(run).history()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        assert main(patch, "train", *TRAIN, "--processes", 1, "--out", folder) == 0
    return folder


def start(folder: Path, processes: int) -> subprocess.Popen[str]:
    # One process alone is the one that is killed, and would leave half a file of coverage behind.
    measured = {name: value for name, value in os.environ.items() if processes > 1 or not name.startswith("COVERAGE")}
    return subprocess.Popen(
        [sys.executable, "-m", "pefll", "train", *TRAIN, "--processes", str(processes), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=measured,
    )


def wait_for_round(process: subprocess.Popen[str], folder: Path, round_: int) -> None:
    """Wait until a checkpoint of at least this round is there, and the run is still going on."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"it ended before it was stopped: {process.communicate()}")
        if any(int(path.name[6:]) >= round_ for path in (folder / "checkpoints").glob("round-*")):
            return
        time.sleep(0.005)
    process.kill()
    pytest.fail("it took too long")


def same_in_the_end(folder: Path, whole: Path) -> None:
    assert fingerprint(folder) == fingerprint(whole)
    assert fingerprint(whole)[0] == ROUNDS
    assert without_seconds(folder) == without_seconds(whole)
    assert [row["round"] for row in without_seconds(folder)] == list(range(EVERY, ROUNDS + 1, EVERY))
    mine, wanted = RunFolder(folder).summary(), RunFolder(whole).summary()
    for key in ("accuracy", "best_round", "rounds", "bytes_down", "bytes_up", "settings"):
        assert mine[key] == wanted[key]


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path, monkeypatch, uninterrupted):
    folder = tmp_path / "killed"
    process = start(folder, processes=1)
    wait_for_round(process, folder, 20)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert RunFolder(folder).summary() is None
    assert main(monkeypatch, "train", "--resume", folder, "--processes", 1) == 0
    same_in_the_end(folder, uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_was_asked_to_stop_saves_and_goes_on(tmp_path, monkeypatch, uninterrupted, number, code):
    folder = tmp_path / "stopped"
    process = start(folder, processes=2)
    wait_for_round(process, folder, 20)
    os.killpg(process.pid, number)  # as a terminal and a batch system do: the whole group, with the workers
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert f"Go on with: pefll train --resume {folder}" in said
    assert "Traceback" not in said
    stopped_at = fingerprint(folder)[0]
    assert 20 <= stopped_at < ROUNDS
    assert f"Saved after round {stopped_at}." in said
    assert main(monkeypatch, "train", "--resume", folder) == 0
    same_in_the_end(folder, uninterrupted)


def test_a_damaged_checkpoint_costs_time_and_nothing_else(tmp_path, monkeypatch, capsys, uninterrupted):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted, folder)
    newest = max((folder / "checkpoints").iterdir())
    content = bytearray((newest / checkpoint.TENSORS).read_bytes())
    content[-100] ^= 1
    (newest / checkpoint.TENSORS).write_bytes(bytes(content))
    assert main(monkeypatch, "train", "--resume", folder, "--processes", 1) == 0
    assert "is damaged" in capsys.readouterr().err
    same_in_the_end(folder, uninterrupted)


QUICK = {"clients_per_round": 2, "local_steps": 1, "eval_every": 2, "processes": 1}


def test_an_extended_run_is_one_long_run(tmp_path):
    federation = ragged()
    fit(federation, "fedavg", rounds=4, out=tmp_path / "short", **QUICK)
    assert RunFolder(tmp_path / "short").summary()["rounds"] == 4
    fit(federation, "fedavg", rounds=8, out=tmp_path / "short", **QUICK)
    fit(federation, "fedavg", rounds=8, out=tmp_path / "long", **QUICK)
    assert fingerprint(tmp_path / "short") == fingerprint(tmp_path / "long")
    assert without_seconds(tmp_path / "short") == without_seconds(tmp_path / "long")
    assert RunFolder(tmp_path / "short").summary()["rounds"] == 8
    with pytest.raises(PefllError, match="extended but not shortened"):
        fit(federation, "fedavg", rounds=6, out=tmp_path / "short", **QUICK)


def test_a_finished_run_started_again_does_nothing_new(tmp_path):
    federation = ragged()
    for _ in range(2):
        run = fit(federation, "pefll", rounds=4, out=tmp_path, **QUICK)
        state = fingerprint(tmp_path), without_seconds(tmp_path), run.summary["accuracy"], run.summary["bytes_up"]
    assert len(state[1]) == 2
    assert state == (fingerprint(tmp_path), without_seconds(tmp_path), run.summary["accuracy"], run.summary["bytes_up"])


def test_a_run_that_ended_before_its_first_checkpoint_starts_with_a_clean_history(tmp_path, monkeypatch):
    federation = ragged()
    with monkeypatch.context() as patch:
        patch.setattr(training, "_save", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
        with pytest.raises(RuntimeError, match="power cut"):
            fit(federation, "fedavg", rounds=6, out=tmp_path / "a", **QUICK)
    assert len(RunFolder(tmp_path / "a").history()) == 3
    fit(federation, "fedavg", rounds=6, out=tmp_path / "a", **QUICK)
    fit(federation, "fedavg", rounds=6, out=tmp_path / "b", **QUICK)
    assert without_seconds(tmp_path / "a") == without_seconds(tmp_path / "b")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_a_run_is_never_resumed_on_other_data_or_with_other_settings(tmp_path):
    fit(ragged(), "fedavg", rounds=2, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match="the data is not what the run was started on"):
        fit(ragged(seed=1), "fedavg", rounds=2, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match="started with seed = 0"):
        fit(ragged(), "fedavg", rounds=2, seed=1, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match="started with settings"):
        fit(ragged(), "fedavg", rounds=2, out=tmp_path, **QUICK | {"local_steps": 2})


def test_the_same_run_may_change_engine(tmp_path):
    fit(ragged(), "fedavg", rounds=2, out=tmp_path / "a", precision="float64", **QUICK)
    run = fit(ragged(), "fedavg", rounds=6, out=tmp_path / "a", precision="float64", engine="vector", **QUICK)
    whole = fit(ragged(), "fedavg", rounds=6, precision="float64", **QUICK)
    torch.testing.assert_close(flat(run.final), flat(whole.final), rtol=0, atol=1e-9)
    assert run.final.theta.dtype == torch.float64


# What the loop does, with an engine that only counts.


class State(NamedTuple):
    theta: Tensor


METHOD = SimpleNamespace(local_steps=3, local_epochs=0, batch_size=4, trains_new_clients=False)


class Counting:
    """An engine whose state is the number of rounds done."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.federation, self.clients_per_round = ragged(), 2
        self.calls: list[tuple[int, int]] = []

    def start(self) -> State:
        return State(torch.zeros(1))

    def launch(self, server: State, first: int, rounds: int) -> tuple[State, Later]:
        assert float(server.theta) == first
        self.calls.append((first, rounds))
        self.ledger.up += rounds
        return State(server.theta + rounds), ready(None)

    def snapshot(self, server: State) -> State:
        return server


def ready(value: object) -> Later:
    return Clock(torch.device("cpu")).later(torch.empty(0), lambda _: value)


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

    monkeypatch.setattr(training, "Exam", Fake)
    return looked


def run_loop(config: Config, folder: RunFolder | None = None, engine: Counting | None = None) -> training.Progress:
    with stop_signals() as asked_to_stop:
        turns = training.train(engine or Counting(), METHOD, config, folder, Silent(), {}, asked_to_stop)
        (outcome,) = take_turns([Job(turns, nullcontext)])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


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
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    run_loop(Config(rounds=20, eval_every=5), RunFolder(tmp_path))
    assert len(list((tmp_path / "checkpoints").iterdir())) == checkpoint.KEEP


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

    def launch(self, server: State, first: int, rounds: int) -> tuple[State, Waited]:
        assert float(server.theta) == first
        self.calls.append((first, rounds))
        self.log.append(("launched", first + rounds))
        self.theta.fill_(first + rounds)
        diverged = self.bad is not None and first + rounds >= self.bad
        return State(self.theta), Waited(PefllError("diverged") if diverged else None, self.log, first + rounds)

    def snapshot(self, server: State) -> State:
        return State(server.theta.clone())


def busy_exams(monkeypatch, engine: Busy, values: dict[int, float]) -> None:
    class Exam:
        def __init__(self, *_):
            pass

        def begin(self, server):
            at = int(server.theta)
            result = Evaluation(Accuracy(values.get(at, 0.1), 0.0, 1.0, 1.0, 0.0), None)
            return Waited(result, engine.log, f"exam {at}")

    monkeypatch.setattr(training, "Exam", Exam)


def test_the_next_rounds_are_launched_before_an_evaluation_is_waited_for(monkeypatch, tmp_path):
    engine = Busy()
    busy_exams(monkeypatch, engine, {20: 0.9, 30: 0.5})
    config = Config(rounds=50, eval_every=10, checkpoint_every=1000)
    progress = run_loop(config, RunFolder(tmp_path), engine)
    for at in (10, 20, 30):
        following = min(first + rounds for first, rounds in engine.calls if first + rounds > at)
        assert engine.log.index(("launched", following)) < engine.log.index(f"exam {at}")
    # And no further than one stretch ahead, whose evaluation would be recorded in order.
    waiting = 0
    for event in engine.log:
        if isinstance(event, tuple):
            waiting += 1
        elif isinstance(event, int):
            waiting -= 1
        assert waiting <= training.AHEAD + 1
    assert [row["round"] for row in RunFolder(tmp_path).history()] == [10, 20, 30, 40, 50]
    # The best state is the one that was evaluated, not what became of its memory.
    assert (progress.best_round, float(progress.best.theta)) == (20, 20)
    assert float(progress.server.theta) == 50


def test_no_checkpoint_is_written_while_an_evaluation_is_pending(monkeypatch, tmp_path):
    engine = Busy()
    busy_exams(monkeypatch, engine, {10: 0.2, 20: 0.9})
    save, saved = training._save, []

    def check(engine_, progress, folder, facts):
        history = [row["round"] for row in folder.history()]
        launched = [name for name in engine.log if isinstance(name, tuple)][-1][1]
        saved.append((progress.round, progress.best_round, float(progress.server.theta), launched, history))
        save(engine_, progress, folder, facts)

    monkeypatch.setattr(training, "_save", check)
    run_loop(Config(rounds=40, eval_every=10, checkpoint_every=20), RunFolder(tmp_path), engine)
    assert saved == [(20, 20, 20.0, 20, [10, 20]), (40, 20, 40.0, 40, [10, 20, 30, 40])]


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
        def launch(self, server, first, rounds):
            if first >= 11:
                os.kill(os.getpid(), number)
            return super().launch(server, first, rounds)

    with pytest.raises(training.Stopped) as stopped:
        run_loop(Config(rounds=100, eval_every=10), RunFolder(tmp_path), Signalled())
    assert stopped.value.signal == number
    assert 11 < stopped.value.round < 100
    assert checkpoint.latest(tmp_path / "checkpoints", pytest.fail).round == stopped.value.round
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once(monkeypatch):
    scripted(monkeypatch, dict.fromkeys(range(0, 101, 10), (0.5, 0.5)))

    class Impatient(Counting):
        def launch(self, server, first, rounds):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second one should not come back")

    with pytest.raises(KeyboardInterrupt):
        run_loop(Config(rounds=100, eval_every=10), None, Impatient())


def test_training_works_outside_of_the_main_thread():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(lambda: fit(ragged(), "fedavg", rounds=2, **QUICK)).result()
    assert run.summary["rounds"] == 2


# What a run leaves behind.

KEYS = {
    "method", "dataset", "partition", "num_clients", "num_seen", "num_unseen", "rounds", "clients_per_round",
    "local_steps", "seed", "device", "precision", "version", "commit", "train_seconds", "eval_seconds",
    "client_steps_per_second", "bytes_down", "bytes_up", "peak_memory_bytes", "best_round", "accuracy",
}  # fmt: skip


@pytest.mark.parametrize("method", ["pefll", "fedavg", "local"])
def test_the_summary_has_what_every_tool_counts_on(tmp_path, method):
    settings = {"epochs": 1} if method == "local" else {"local_steps": 3}
    run = fit(ragged(), method, rounds=4, clients_per_round=2, processes=1, out=tmp_path, **settings)
    summary = json.loads((tmp_path / "summary.json").read_text())
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
    loaded = load(tmp_path)
    assert loaded.summary == summary
    assert torch.equal(flat(loaded.server), flat(run.server))
    assert torch.equal(flat(loaded.final), flat(run.final))
    assert [*tmp_path.glob("events.out.tfevents.*")]
    again = loaded.evaluate("test", ragged())
    assert again.seen._asdict() == pytest.approx(summary["accuracy"]["best"]["seen"])
    with pytest.raises(PefllError, match="trained on data given in Python"):
        loaded.evaluate()
    if method == "pefll":
        with np.load(tmp_path / "descriptors.npz") as saved:
            assert saved["descriptors"].shape == (8, 3)
            assert saved["seen"].sum() == 6
            np.testing.assert_array_equal(saved["histograms"], ragged().histograms())


def test_best_and_final_are_scored_apart(tmp_path, monkeypatch):
    values = iter([0.9, 0.1])

    class Fake(training.Exam):
        def _read(self, scores):
            result = super()._read(scores)
            return result._replace(seen=result.seen._replace(per_sample=next(values)))

    monkeypatch.setattr(training, "Exam", Fake)
    settings = {"local_steps": 8, "client_lr": 0.3, "clients_per_round": 4, "processes": 1}
    run = fit(ragged(sizes=(30,)), "fedavg", rounds=4, eval_every=2, **settings)
    assert run.summary["best_round"] == 2
    assert not torch.equal(run.server.theta, run.final.theta)
    assert run.summary["accuracy"]["best"] != run.summary["accuracy"]["final"]


def test_the_commit_is_recorded(monkeypatch, tmp_path):
    from pefll.summary import commit

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


def test_nobody_else_may_own_the_folder(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    with pytest.raises(PefllError, match="exists and is not a run folder"):
        fit(ragged(), "fedavg", rounds=1, out=tmp_path / "precious", **QUICK)
    (tmp_path / "file").write_text("...")
    with pytest.raises(PefllError, match="exists and is not a run folder"):
        fit(ragged(), "fedavg", rounds=1, out=tmp_path / "file", **QUICK)
    with pytest.raises(PefllError, match="cannot make the folder"):
        fit(ragged(), "fedavg", rounds=1, out=tmp_path / "file" / "below", **QUICK)
    assert sorted(os.listdir(tmp_path)) == ["file", "precious"]
    assert os.listdir(tmp_path / "precious") == ["thesis.tex"]


def test_evaluations_use_a_quarter_of_the_samples_trained_on_between_them():
    engine = SimpleNamespace(federation=ragged(clients=40, sizes=(60,)), clients_per_round=2)  # 60 + 21 samples each
    method = SimpleNamespace(local_steps=5, local_epochs=0, batch_size=8)
    assert training.evaluated_share(engine, method, Config(eval_every=10)) == pytest.approx(0.25 * 800 / (40 * 81))
    assert training.evaluated_share(engine, method, Config(eval_every=1000)) == 1.0
    assert training.evaluated_share(engine, method, Config(eval_every=10, eval_clients=10)) == 0.25
    whole = SimpleNamespace(local_steps=5, local_epochs=0, batch_size=0)
    assert training.evaluated_share(engine, whole, Config(eval_every=2)) == pytest.approx(0.25 * 20 / 40)
    epochs = SimpleNamespace(local_steps=0, local_epochs=3, batch_size=8)
    assert training.evaluated_share(engine, epochs, Config(eval_every=2)) == pytest.approx(0.25 * 12 / 40)
    assert training.local_steps(epochs, engine.federation) == 3 * 8  # 60 samples are 8 batches
    assert training.local_steps(method, engine.federation) == 5
