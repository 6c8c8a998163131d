"""The run folder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

import pefll
from pefll.core.errors import PefllError
from pefll.runs import checkpoint
from pefll.runs.checksums import last_check
from pefll.runs.config import Config
from pefll.runs.record import RunFolder, run_folders, seed_folder
from tests.federations import ragged


def test_history_is_appended_and_cut(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.history() == []
    folder.keep_history_until(3)
    assert not folder.history_file.exists()
    for round_ in (2, 4, 6):
        folder.append_history({"round": round_, "seen": {"per_sample": 0.5}})
    assert [row["round"] for row in folder.history()] == [2, 4, 6]
    folder.keep_history_until(4)
    assert [row["round"] for row in folder.history()] == [2, 4]
    folder.append_history({"round": 6})
    assert [row["round"] for row in folder.history()] == [2, 4, 6]
    folder.keep_history_until(0)
    assert folder.history() == []


def test_a_line_cut_off_by_a_crash_is_left_out_and_does_not_spoil_the_next(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_history({"round": 2})
    folder.append_history({"round": 4, "seen": {"per_sample": 0.5}})
    text = folder.history_file.read_text()
    folder.history_file.write_text(text[:-9])
    assert folder.history() == [{"round": 2}]
    folder.keep_history_until(4)
    folder.append_history({"round": 4})
    assert folder.history() == [{"round": 2}, {"round": 4}]


def test_history_is_on_the_disk_before_a_checkpoint_says_so(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(RunFolder, "sync_history", lambda self: events.append([row["round"] for row in self.history()]))
    saved = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: (events.append(arguments[1]), saved(*arguments)))
    pefll.fit(ragged(), "fedavg", model="tiny", rounds=4, eval_every=2, checkpoint_every=2, out=tmp_path / "run")
    assert events == [[2], 2, [2, 4], 4]


def test_syncing_history_waits_for_the_disk_and_tells_of_its_errors(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.sync_history()
    assert not folder.history_file.exists()
    folder.append_history({"round": 2})
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    folder.sync_history()
    # The lines, and the name under which they are found.
    assert synced == [folder.history_file.stat().st_ino, folder.path.stat().st_ino]
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    advice = "free some space, then go on from the last checkpoint, if there is one, with "
    with pytest.raises(PefllError, match=rf"history\.jsonl: No space left on device; {advice}.*PEFLL-A102"):
        folder.sync_history()


def test_summary(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.summary() is None
    folder.write_summary({"rounds": 3})
    assert folder.summary() == {"rounds": 3}
    folder.summary_file.write_text("{")
    for content in ("{", "[1]"):
        folder.summary_file.write_text(content)
        with pytest.raises(
            PefllError,
            match=r"is damaged: .*; move it away, and pefll\.fit\(federation, .*\) makes it again.*PEFLL-R009",
        ):
            folder.summary()


def test_what_is_a_run(tmp_path):
    with pytest.raises(PefllError, match=r"is not a run folder: it has no config\.toml.*PEFLL-R120"):
        RunFolder(tmp_path).check_is_run()
    with pytest.raises(PefllError, match=r"is not a run folder: there is no such folder; pefll\.fit\(.*PEFLL-R120"):
        RunFolder(tmp_path / "none").check_is_run()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("")
    with pytest.raises(PefllError, match=r"but holds run folders; name one, such as .*mine.*PEFLL-R119"):
        RunFolder(tmp_path).check_is_run()
    (tmp_path / "config.toml").write_text("")
    RunFolder(tmp_path).check_is_run()


def test_a_full_disk_while_history_is_written_is_a_sentence(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.append_history({"round": 2})
    full_disk = RunFolder(tmp_path / "full")
    full_disk.path.mkdir()
    full_disk.history_file.symlink_to("/dev/full")
    with pytest.raises(PefllError, match=r"No space left.*PEFLL-A102"):
        full_disk.append_history({"round": 4})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PefllError, match=r"No space left.*PEFLL-A102"):
        folder.keep_history_until(0)
    assert folder.history()[0] == {"round": 2}


def test_a_folder_of_several_seeds_stands_for_its_runs(tmp_path):
    for seed in (10, 2, 0):
        folder = RunFolder(seed_folder(tmp_path / "c10", seed))
        folder.path.mkdir(parents=True)
        folder.config_file.write_text("")
    (tmp_path / "c10" / "seed-x").mkdir()
    (tmp_path / "c10" / "seed-5").mkdir()  # not a run
    assert [folder.path.name for folder in run_folders(tmp_path / "c10")] == ["seed-0", "seed-2", "seed-10"]
    assert run_folders(tmp_path / "c10" / "seed-2") == [RunFolder(tmp_path / "c10" / "seed-2")]
    assert run_folders(tmp_path / "none") == [RunFolder(tmp_path / "none")]
    with pytest.raises(
        PefllError, match=r"holds runs of several seeds; name one of them, such as .*seed-0.*PEFLL-R118"
    ):
        RunFolder(tmp_path / "c10").check_is_run()


def test_a_folder_is_held_by_one_process_and_let_go_with_it(tmp_path):
    folder = RunFolder(tmp_path)
    script = (
        "import pathlib, sys, time\nfrom pefll.runs.record import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).held():\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(PefllError, match="PEFLL-R122"), folder.held():
                pass
        finally:
            other.kill()
    with folder.held():
        pass
    with folder.held():
        pass


def test_a_folder_that_nothing_came_of_is_not_left_behind(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    with folder.held():
        assert folder.path.is_dir()
    assert not folder.path.exists()
    with folder.held():
        folder.config_file.write_text("")
    assert folder.config_file.exists()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.warns(UserWarning, match="lies on a file system without locks"), RunFolder(tmp_path / "run").held():
        pass


def test_one_folder_that_is_held_keeps_all_seeds_from_beginning(tmp_path):
    held = RunFolder(seed_folder(tmp_path, 1))
    with held.held():
        with pytest.raises(PefllError, match="PEFLL-R122"):
            pefll.fit_seeds(ragged(), "fedavg", seeds=[0, 1], rounds=1, out=tmp_path, device="cpu", clients_per_round=3)
        assert not seed_folder(tmp_path, 0).exists()


def test_nobody_trains_into_a_folder_that_is_held(tmp_path):
    federation = ragged()
    with RunFolder(tmp_path).held(), pytest.raises(PefllError, match="PEFLL-R122"):
        pefll.fit(federation, "fedavg", rounds=1, out=tmp_path, device="cpu", clients_per_round=3)
    assert not (tmp_path / "config.toml").exists()
    run = pefll.fit(federation, "fedavg", rounds=1, out=tmp_path, device="cpu", clients_per_round=3)
    assert run.summary["rounds"] == 1


def test_the_last_check_is_found_in_files_of_any_size(tmp_path):
    folder, path = RunFolder(tmp_path), tmp_path / "history.jsonl"
    assert last_check(path) == ""
    Config().save(folder.config_file, "0123456789abcdef")
    for round_, padding in ((1, 10), (2, 5000), (3, 100_000), (4, 1), (5, 1)):
        folder.append_history({"round": round_, "note": padding * "x"})
        assert json.loads(path.read_text().splitlines()[-1])["check"] == last_check(path)
    assert [row["round"] for row in folder.history()] == [1, 2, 3, 4, 5]
