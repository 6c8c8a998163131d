"""A run that is stopped, killed, resumed or extended ends as one that was not, in a folder that is its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pefll import cli
from pefll.core.errors import PefllError
from pefll.core.signals import STOPPING
from pefll.runs import checkpoint, saver
from pefll.runs.checksums import new_run
from pefll.runs.config import Config
from pefll.runs.record import RunFolder
from pefll.training.callbacks import Callback
from pefll.training.fitting import fit, fit_seeds
from pefll.training.run import load
from tests.federations import flat, ragged

ROUNDS, EVERY = 80, 20
TRAIN = (
    f"--data digits --clients 8 --model mlp --rounds {ROUNDS} --clients-per-round 2 --eval-every {EVERY} "
    "--checkpoint-every 10 --engine serial --set hypernetwork=S --set local_steps=2 --set embedding=linear "
    "--set server_average=0.9 --seed 3"
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


def start(folder: Path, processes: int, terminal: int = subprocess.PIPE) -> subprocess.Popen[str]:
    # One process alone is the one that is killed, and would leave half a file of coverage behind.
    measured = {name: value for name, value in os.environ.items() if processes > 1 or not name.startswith("COVERAGE")}
    return subprocess.Popen(
        [sys.executable, "-m", "pefll", "train", *TRAIN, "--processes", str(processes), "--out", str(folder)],
        stdin=None if terminal == subprocess.PIPE else terminal,
        stdout=terminal,
        stderr=terminal,
        text=True,
        start_new_session=True,
        preexec_fn=None if terminal == subprocess.PIPE else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
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


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_asked_to_stop_saves_and_goes_on(tmp_path, monkeypatch, capsys, uninterrupted, number, code):
    folder = tmp_path / "stopped"
    process = start(folder, processes=2)
    wait_for_round(process, folder, 20)
    os.killpg(process.pid, number)  # as a terminal and a batch system do: the whole group, with the workers
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert f"Go on with: pefll train --resume {folder}" in said
    assert said.count(STOPPING) == 1
    assert "Traceback" not in said
    stopped_at = fingerprint(folder)[0]
    assert 20 <= stopped_at < ROUNDS
    assert f"Saved after round {stopped_at}." in said
    assert "going on" not in said
    assert main(monkeypatch, "train", "--resume", folder) == 0
    assert capsys.readouterr().err.splitlines()[1] == f"pefll seed 3: resuming after round {stopped_at}"
    same_in_the_end(folder, uninterrupted)


@pytest.mark.slow  # SIGTERM is the faster one
def test_a_run_whose_terminal_is_closed_saves_and_goes_on(tmp_path, monkeypatch, uninterrupted):
    folder, (ours, its) = tmp_path / "closed", pty.openpty()
    process = start(folder, processes=2, terminal=its)
    os.close(its)
    wait_for_round(process, folder, 20)
    os.close(ours)  # the system tells the run of it, and whatever the run says from now on is an error
    os.killpg(process.pid, signal.SIGHUP)  # as the shell does besides
    assert process.wait(timeout=60) == 129
    assert 20 <= fingerprint(folder)[0] < ROUNDS
    assert main(monkeypatch, "train", "--resume", folder, "--processes", 1) == 0
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


@pytest.mark.parametrize("rounds", [4, 3])  # where an evaluation is due anyway, and where only the end asks for one
def test_an_extended_run_is_one_long_run(tmp_path, rounds):
    federation = ragged()
    fit(federation, "fedavg", rounds=rounds, out=tmp_path / "short", **QUICK)
    assert RunFolder(tmp_path / "short").summary()["rounds"] == rounds
    assert RunFolder(tmp_path / "short").history()[-1]["round"] == rounds
    fit(federation, "fedavg", rounds=8, out=tmp_path / "short", **QUICK)
    fit(federation, "fedavg", rounds=8, out=tmp_path / "long", **QUICK)
    assert fingerprint(tmp_path / "short") == fingerprint(tmp_path / "long")
    assert without_seconds(tmp_path / "short") == without_seconds(tmp_path / "long")
    assert RunFolder(tmp_path / "short").summary()["rounds"] == 8
    with pytest.raises(PefllError, match=rf"^{tmp_path / 'short'}: .*\b8 rounds.*\bout \[PEFLL-R105\]$"):
        fit(federation, "fedavg", rounds=6, out=tmp_path / "short", **QUICK)


@pytest.mark.parametrize("method", ["pefll", "local"])
def test_a_finished_run_started_again_is_returned_as_it_was_recorded(tmp_path, monkeypatch, method):
    federation = ragged()
    quick = QUICK if method == "pefll" else {"epochs": 1, "processes": 1}
    first = fit(federation, method, rounds=4, out=tmp_path, **quick)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(without_seconds(tmp_path)) == (2 if method == "pefll" else 0)
    monkeypatch.setattr("pefll.training.fitting.summary_of", lambda *_: pytest.fail("it was tested again"))
    monkeypatch.setattr("pefll.training.fitting.open_engine", lambda *_: pytest.fail("clients were asked for"))
    again = fit(federation, method, rounds=4, out=tmp_path, **quick)
    assert again.summary == first.summary
    assert torch.equal(flat(again.server), flat(first.server))
    assert torch.equal(flat(again.final), flat(first.final))
    assert again.evaluate() == first.evaluate()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    with pytest.raises(PefllError, match="PEFLL-R103"):
        fit(ragged(seed=1), method, rounds=4, out=tmp_path, **quick)


def test_finished_seeds_among_others(tmp_path, capsys):
    first = fit_seeds(ragged(), "fedavg", seeds=[1, 2], rounds=2, out=tmp_path, **QUICK)
    console = Console(width=200)
    runs = fit_seeds(ragged(), "fedavg", seeds=[0, 1, 3, 2], rounds=2, out=tmp_path, console=console, **QUICK)
    assert [run.summary["seed"] for run in runs] == [0, 1, 3, 2]
    assert [runs[1].summary, runs[3].summary] == [run.summary for run in first]
    assert [runs[0].summary["lockstep"], runs[2].summary["lockstep"]] == [2, 2]
    assert capsys.readouterr().out.count("is already finished; skipped") == 2


def test_a_run_that_ended_before_its_first_checkpoint_starts_with_a_clean_history(tmp_path, monkeypatch):
    federation = ragged()
    with monkeypatch.context() as patch:
        patch.setattr(saver.Saver, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
        with pytest.raises(RuntimeError, match="power cut"):
            fit(federation, "fedavg", rounds=6, out=tmp_path / "a", **QUICK)
    assert len(RunFolder(tmp_path / "a").history()) == 3
    fit(federation, "fedavg", rounds=6, out=tmp_path / "a", **QUICK)
    fit(federation, "fedavg", rounds=6, out=tmp_path / "b", **QUICK)
    assert without_seconds(tmp_path / "a") == without_seconds(tmp_path / "b")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_a_run_is_never_resumed_on_other_data_or_with_other_settings(tmp_path):
    fit(ragged(), "fedavg", rounds=2, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match="PEFLL-R103"):
        fit(ragged(seed=1), "fedavg", rounds=2, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match=r"\bseed=0.*PEFLL-R104"):
        fit(ragged(), "fedavg", rounds=2, seed=1, out=tmp_path, **QUICK)
    with pytest.raises(PefllError, match=r"\bsettings\b.*PEFLL-R104"):
        fit(ragged(), "fedavg", rounds=2, out=tmp_path, **QUICK | {"local_steps": 2})


def test_a_run_that_fails_before_its_first_round_leaves_no_folder(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "pefll.training.fitting.start_or_resume", lambda *_: (_ for _ in ()).throw(RuntimeError("bad loss"))
        )
        with pytest.raises(RuntimeError, match="bad loss"):
            fit(ragged(), "fedavg", rounds=2, out=tmp_path / "a", **QUICK)
    assert not (tmp_path / "a").exists()


def test_a_folder_without_rounds_takes_other_settings_and_other_data(tmp_path):
    folder = RunFolder(tmp_path)
    Config(method="fedavg", data="ragged", data_sha256="a").save(
        folder.config_file, new_run()
    )  # a killed process leaves no more
    run = fit(ragged(), "pefll", seed=3, rounds=2, out=tmp_path, **QUICK)
    assert (run.summary["seed"], run.summary["rounds"]) == (3, 2)
    assert load(tmp_path).config.settings == run.config.settings


def test_a_folder_whose_only_checkpoint_is_of_round_zero_takes_other_settings(tmp_path):
    class Fails(Callback):
        def on_start(self, run):
            raise RuntimeError("at the start")

    with pytest.raises(PefllError, match="at the start"):
        fit(ragged(), "fedavg", rounds=2, out=tmp_path, callbacks=[Fails()], **QUICK)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round-00000000"]
    run = fit(ragged(), "pefll", rounds=2, out=tmp_path, **QUICK)
    assert flat(load(tmp_path).final).equal(flat(run.final))


def test_a_module_of_another_size_is_told_so(tmp_path):
    def module(width):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, width), torch.nn.Linear(width, 3))

    federation = ragged()
    fit(federation, "fedavg", model=module(5), rounds=2, out=tmp_path, **QUICK)
    for rounds in (2, 4):  # finished, and to be extended
        with pytest.raises(PefllError, match=r"\b53\b.*\b73\b.*PEFLL-N026"):
            fit(federation, "fedavg", model=module(7), rounds=rounds, out=tmp_path, **QUICK)


def test_nobody_else_may_own_the_folder(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    with pytest.raises(PefllError, match="PEFLL-T109"):
        fit(ragged(), "fedavg", rounds=1, out=tmp_path / "precious", **QUICK)
    (tmp_path / "file").write_text("...")
    with pytest.raises(PefllError, match="PEFLL-T109"):
        fit(ragged(), "fedavg", rounds=1, out=tmp_path / "file", **QUICK)
    with pytest.raises(PefllError, match="PEFLL-R121"):
        fit(ragged(), "fedavg", rounds=1, out=tmp_path / "file" / "below", **QUICK)
    assert sorted(os.listdir(tmp_path)) == ["file", "precious"]
    assert os.listdir(tmp_path / "precious") == ["thesis.tex"]


def test_the_same_run_may_change_engine(tmp_path):
    fit(ragged(), "fedavg", rounds=2, out=tmp_path / "a", precision="float64", **QUICK)
    run = fit(ragged(), "fedavg", rounds=6, out=tmp_path / "a", precision="float64", engine="vector", **QUICK)
    whole = fit(ragged(), "fedavg", rounds=6, precision="float64", **QUICK)
    torch.testing.assert_close(flat(run.final), flat(whole.final), rtol=0, atol=1e-9)
    assert run.final.theta.dtype == torch.float64
