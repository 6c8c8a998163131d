"""Damage in a run's folder is named, and nothing of the run is lost by it."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.report.descriptors import read_descriptors
from pefll.report.runs import read_run
from pefll.runs import checkpoint, manifest
from pefll.runs.checksums import MOST_LINE, digest, read_rows
from pefll.runs.claim import finished_state
from pefll.runs.config import Config
from pefll.runs.record import RunFolder, run_folders
from tests.faults.damages import HOSTILE, put
from tests.federations import flat, ragged

ROUNDS = 4
QUICK = {"clients_per_round": 2, "local_steps": 1, "eval_every": 1, "checkpoint_every": 2, "processes": 1}
PEFLL = QUICK | {"embedding": "linear", "hypernetwork": "S", "client_lr": 0.02, "device": "cpu", "engine": "serial"}


def trained(folder: Path, rounds: int = ROUNDS, seed: int = 0, console=None) -> pefll.Run:
    return pefll.fit(ragged(), "pefll", rounds=rounds, seed=seed, out=folder, console=console, **PEFLL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A finished run, and another one."""
    folder = tmp_path_factory.mktemp("runs")
    trained(folder / "a")
    trained(folder / "b", seed=1)
    return folder


@pytest.fixture
def folder(runs, tmp_path) -> RunFolder:
    shutil.copytree(runs / "a", tmp_path / "a")
    return RunFolder(tmp_path / "a")


def without_seconds(folder: RunFolder) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in folder.history()]


def code_of(call, *arguments) -> str:
    with pytest.raises(PefllError) as error:
        call(*arguments)
    return error.value.code


def resumed(folder: RunFolder, capsys, rounds: int = ROUNDS) -> str:
    """Go on with a run; return what was said."""
    from rich.console import Console

    trained(folder.path, rounds, console=Console(width=2000))
    return capsys.readouterr().out


def names(folder: RunFolder) -> list[str]:
    return sorted(name for name in os.listdir(folder.path) if "tfevents" not in name)


def replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


# Checkpoints.


def test_exchanged_checkpoints_do_not_pass_for_each_other(folder):
    (older, newer), aside = sorted(folder.checkpoints.iterdir()), folder.path / "aside"
    older.rename(aside), newer.rename(older), aside.rename(newer)
    with pytest.warns(UserWarning, match="of round 2: folders were renamed or exchanged; call it round-00000002"):
        assert code_of(pefll.load, folder.path) == "PEFLL-R018"
    assert code_of(trained, folder.path) == "PEFLL-R018"
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [older.name, newer.name]
    older.rename(aside), newer.rename(older), aside.rename(newer)
    pefll.load(folder.path)


def test_a_checkpoint_of_another_run_is_passed_over(runs, folder, capsys):
    newest = max(folder.checkpoints.iterdir())
    shutil.rmtree(newest)
    shutil.copytree(runs / "b" / "checkpoints" / newest.name, newest)
    with pytest.warns(UserWarning, match="belongs to another run than config.toml"):
        pefll.load(folder.path)
    said = resumed(folder, capsys)
    assert "belongs to another run" in said
    assert (folder.checkpoints / f"{newest.name}.damaged-1").is_dir()
    assert without_seconds(folder) == without_seconds(RunFolder(runs / "a"))
    assert torch.equal(flat(pefll.load(folder.path).final), flat(pefll.load(runs / "a").final))


def test_the_newest_checkpoint_cannot_go_unnoticed(folder):
    shutil.rmtree(max(folder.checkpoints.iterdir()))
    with pytest.warns(UserWarning, match="is at round 2 of 4"):
        pefll.load(folder.path)


@pytest.mark.filterwarnings("ignore")
def test_manifests_of_strangers_with_the_right_sha_are_refused(folder):
    manifests = sorted(folder.checkpoints.glob("*/manifest.json"))
    clean = [path.read_text() for path in manifests]
    for where, value in HOSTILE:
        for path in manifests:
            put(path, where, value)
        code_of(pefll.load, folder.path)
        folder.run_id(), folder.trained_with(), read_run(folder)
        for path, text in zip(manifests, clean, strict=True):
            path.write_text(text)
    put(manifests[-1], "facts/problem/input_shape", [10**9])
    assert code_of(pefll.load, folder.path) == "PEFLL-L007"
    put(manifests[-1], "facts/problem", 5)
    assert code_of(trained, folder.path) == "PEFLL-R020"
    manifests[-1].write_text(clean[-1])
    folder.summary_file.unlink()
    put(manifests[-1], "facts/progress/ledger", {"add": 1})
    assert code_of(trained, folder.path) == "PEFLL-R021"


def test_what_is_no_model_has_a_code(folder):
    assert code_of(pefll.load, folder.path, None, 5) == "PEFLL-M050"


def test_a_manifest_leads_to_no_file_elsewhere(folder):
    path = max(folder.checkpoints.iterdir())
    content = folder.config_file.read_bytes()
    wanted = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    files = json.loads((path / "manifest.json").read_text())["files"]
    put(path / "manifest.json", "files", files | {"../../config.toml": wanted})
    assert code_of(checkpoint.load, path) == "PEFLL-R004"


def take_out(path: Path, *names: str) -> None:
    """Take values out of a manifest, and give it the SHA-256 that it has then."""
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    for name in names:
        *above, last = name.split("/")
        inner = content
        for each in above:
            inner = inner[each]
        del inner[last]
    (path / "manifest.json").write_text(json.dumps(content | {"sha256": digest(content)}))


def exchange_checkpoints(folder: RunFolder, other: Path) -> list[Path]:
    """Put the checkpoints of another run in place of a run's own, and return their folders."""
    shutil.rmtree(folder.checkpoints)
    shutil.copytree(other / "checkpoints", folder.checkpoints)
    return sorted(folder.checkpoints.iterdir())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stripped", [["facts/run"], ["facts/run/id", "facts/run/config"]])
def test_another_runs_checkpoints_without_its_name_are_refused(runs, folder, stripped):
    for path in exchange_checkpoints(folder, runs / "b"):
        take_out(path, *stripped)
        assert code_of(checkpoint.load, path, folder.run_id()) == "PEFLL-R023"
    assert code_of(pefll.load, folder.path) == "PEFLL-R018"
    assert code_of(trained, folder.path, ROUNDS + 1) == "PEFLL-R018"


def test_checkpoints_that_look_like_an_earlier_versions_are_reported_in_a_run_that_is_not(runs, folder, capsys):
    for path in exchange_checkpoints(folder, runs / "b"):
        take_out(path, "facts/run", "files/history.jsonl")
    with pytest.warns(UserWarning, match="does not name its run: an earlier version wrote it, or"):
        pefll.load(folder.path)
    assert finished_state(folder, ROUNDS) is None
    assert "does not name its run" in resumed(folder, capsys)


# config.toml.


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        (b"client_lr = 0.02", b"client_lr = 0.05", "PEFLL-R002", r"client_lr = 0\.05"),
        (b"seed = 0", b"seed = 1", "PEFLL-R002", "seed = 1"),
        (b"rounds = 4", b"rounds = 9", "PEFLL-R003", r"rounds = 9\b.*\b4\b"),
        (b'device = "cpu"', b'device = "cuda"', "PEFLL-R003", "device = .cuda"),
        (b"eval_every = 1", b"eval_every = \xff", "PEFLL-R001", "facts.run.config"),
        (b"eval_every = 1", b"eval_every = " + b"[" * 10_000, "PEFLL-R001", "brackets"),
        (b"seed = 0", b"seed = 1979-05-27", "PEFLL-R002", "seed = 1979-05-27"),
        (b"local_steps = 1\n", b"", "PEFLL-R002", "local_steps = nothing"),
        (b"[settings]", b"[[settings]]", "PEFLL-R002", "= nothing"),
    ],
)
def test_settings_that_were_changed_by_hand_are_named(folder, old, new, code, words):
    clean = folder.config_file.read_bytes()
    replace(folder.config_file, old, new)
    for reader in (pefll.load, trained, lambda path: read_run(RunFolder(path))):
        with pytest.raises(PefllError, match=words) as error:
            reader(folder.path)
        assert error.value.code == code
    folder.config_file.write_bytes(clean)
    pefll.load(folder.path)


def test_a_comment_in_the_settings_and_a_damaged_check_mean_nothing(folder, runs, capsys):
    replace(folder.config_file, b"rounds = 4", b"rounds = 4  # as in the paper")
    assert torch.equal(flat(pefll.load(folder.path).server), flat(pefll.load(runs / "a").server))
    folder.config_file.write_text(RunFolder(runs / "a").config_file.read_text().partition("\n")[2])
    assert folder.run_id() == RunFolder(runs / "a").run_id()
    read_run(folder)


def test_settings_may_change_where_they_could_before(folder, capsys):
    resumed(folder, capsys, rounds=ROUNDS + 1)
    assert Config.load(folder.config_file, folder.trained_with()).rounds == ROUNDS + 1
    assert folder.summary()["rounds"] == ROUNDS + 1
    assert len(folder.history()) == ROUNDS + 1


def test_settings_without_a_checkpoint_carry_a_check_of_their_own(folder):
    shutil.rmtree(folder.checkpoints)
    replace(folder.config_file, b"client_lr = 0.02", b"client_lr = 0.05")
    assert code_of(read_run, folder) == "PEFLL-R003"
    folder.config_file.write_bytes(b"")
    assert code_of(read_run, folder) == "PEFLL-R001"


# history.jsonl.


def cut_last(content: bytes) -> bytes:
    return b"".join(content.splitlines(keepends=True)[:-1])


def drop_second(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[:1] + lines[2:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b'"round": 2', b'"round": @', 1),
        lambda content: content.replace(b'"round": 2', b'"round": 1' + 400 * b"0", 1),
        lambda content: content.replace(b'"per_sample": 0', b'"per_sample": 1', 1),
        lambda content: content.replace(b'"round"', b'"r\xffund"', 1),
        lambda content: content.replace(b'"check"', b'"chuck"', 1),
        lambda content: b"[" * 10_000 + b"\n" + content,
        lambda content: content[:-30],
        lambda content: b"",
        cut_last,
        drop_second,
    ],
)
def test_a_damaged_history_is_named_kept_aside_and_restored(runs, folder, capsys, damage):
    damaged = damage(folder.history_file.read_bytes())
    folder.history_file.write_bytes(damaged)
    summary = folder.summary_file.read_bytes()
    assert code_of(read_run, folder) == "PEFLL-R008"
    assert folder.summary_file.read_bytes() == summary
    assert finished_state(folder, ROUNDS) is None
    said = resumed(folder, capsys)
    assert "history.jsonl is damaged" in said
    assert "4 evaluations of it are restored" in said
    assert (folder.path / "history.jsonl.damaged-1").read_bytes() == damaged
    assert folder.history() == RunFolder(runs / "a").history()
    assert folder.summary()["accuracy"] == RunFolder(runs / "a").summary()["accuracy"]


@pytest.mark.parametrize("kind", ["missing", "folder", "link", "another's"])
def test_a_history_that_is_none_is_restored(runs, folder, capsys, kind):
    folder.history_file.unlink()
    if kind == "folder":
        folder.history_file.mkdir()
    elif kind == "link":
        folder.history_file.symlink_to("nowhere")
    elif kind == "another's":
        shutil.copy(runs / "b" / "history.jsonl", folder.history_file)
    assert code_of(read_run, folder) == "PEFLL-R008"
    assert "4 evaluations of it are restored" in resumed(folder, capsys)
    assert folder.history() == RunFolder(runs / "a").history()
    assert (kind == "missing") != os.path.lexists(folder.path / "history.jsonl.damaged-1")


# summary.json, descriptors.npz.


@pytest.mark.parametrize("kind", ["value", "no check", "not JSON", "byte", "deep", "folder", "link", "another's"])
def test_a_damaged_summary_is_named_kept_aside_and_made_again(runs, folder, capsys, kind):
    content = json.loads(folder.summary_file.read_text())
    folder.summary_file.unlink()
    if kind == "value":
        folder.summary_file.write_text(json.dumps(content | {"best_round": 77}))
    elif kind == "no check":
        folder.summary_file.write_text(json.dumps({key: content[key] for key in content if key != "check"}))
    elif kind == "not JSON":
        folder.summary_file.write_text(json.dumps(content)[:-10])
    elif kind == "byte":
        folder.summary_file.write_bytes(json.dumps(content).encode().replace(b"best", b"b\xffst"))
    elif kind == "deep":
        folder.summary_file.write_bytes(b"[" * 10_000)
    elif kind == "folder":
        folder.summary_file.mkdir()
    elif kind == "link":
        folder.summary_file.symlink_to("nowhere")
    else:
        shutil.copy(runs / "b" / "summary.json", folder.summary_file)
    code = "PEFLL-R010" if kind == "another's" else "PEFLL-R009"
    assert code_of(pefll.load, folder.path) == code
    assert code_of(read_run, folder) == code
    assert "it is kept as summary.json.damaged-1" in resumed(folder, capsys)
    assert folder.summary()["accuracy"] == RunFolder(runs / "a").summary()["accuracy"]
    assert os.path.lexists(folder.path / "summary.json.damaged-1")


def test_the_results_of_before_are_there_until_those_of_an_extended_run_are(folder, monkeypatch):
    before, seen = folder.summary_file.read_bytes(), []
    write = RunFolder.write_summary

    def look(self, summary):
        seen.append(self.earlier_summary_file.read_bytes())
        write(self, summary)

    monkeypatch.setattr(RunFolder, "write_summary", look)
    trained(folder.path, ROUNDS + 1)
    assert seen == [before]
    assert not folder.earlier_summary_file.exists()


@pytest.mark.parametrize("kind", ["missing", "damaged", "another's", "folder", "link"])
def test_damaged_descriptors_are_named_and_made_again(runs, folder, capsys, kind):
    folder.descriptors_file.unlink()
    if kind == "damaged":
        content = bytearray((runs / "a" / "descriptors.npz").read_bytes())
        content[len(content) // 2] ^= 1
        folder.descriptors_file.write_bytes(content)
    elif kind == "another's":
        shutil.copy(runs / "b" / "descriptors.npz", folder.descriptors_file)
    elif kind == "folder":
        folder.descriptors_file.mkdir()
    elif kind == "link":
        folder.descriptors_file.symlink_to("nowhere")
    before = folder.descriptors_file.read_bytes() if folder.descriptors_file.is_file() else None
    assert code_of(read_run, folder) == "PEFLL-R011"
    said, kept = resumed(folder, capsys), folder.path / "descriptors.npz.damaged-1"
    assert ("descriptors.npz is damaged or of another run; it is kept as descriptors.npz.damaged-1" in said) == (
        kind != "missing"
    )
    assert os.path.lexists(kept) == (kind != "missing")
    assert before is None or kept.read_bytes() == before
    read_run(folder)
    wanted = read_descriptors(RunFolder(runs / "a")).descriptors
    assert (read_descriptors(folder).descriptors == wanted).all()


@pytest.mark.parametrize("kind", ["own", "another's", "damaged"])
def test_descriptors_without_a_summary_are_kept_unless_they_are_the_runs_own(runs, folder, capsys, kind):
    folder.summary_file.unlink()
    if kind == "another's":
        shutil.copy(runs / "b" / "descriptors.npz", folder.descriptors_file)
    elif kind == "damaged":
        folder.descriptors_file.write_bytes(b"PK")
    said = resumed(folder, capsys)
    assert ("kept as descriptors.npz.damaged-1" in said) == (kind != "own")
    assert (folder.path / "descriptors.npz.damaged-1").exists() == (kind != "own")


def test_results_are_kept_where_all_checkpoints_are_gone(runs, folder, capsys):
    results = {name: (folder.path / name).read_bytes() for name in ("history.jsonl", "summary.json", "descriptors.npz")}
    shutil.rmtree(folder.checkpoints)
    said = resumed(folder, capsys)
    assert "has no checkpoint: the run starts anew, and its results are kept as history.jsonl.earlier-1, " in said
    for name, content in results.items():
        assert (folder.path / f"{name}.earlier-1").read_bytes() == content
    assert without_seconds(folder) == without_seconds(RunFolder(runs / "a"))
    assert not folder.earlier_summary_file.exists()


# Files that would fill the memory.


@contextmanager
def little_memory(more: int = 4 << 30) -> Iterator[None]:
    """Let this process take only so many bytes more inside the block."""
    pages = Path("/proc/self/statm")
    if not pages.exists():  # not Linux
        yield
        return
    used = int(pages.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.toml", "PEFLL-R001"),
        ("history.jsonl", "PEFLL-R008"),
        ("summary.json", "PEFLL-R009"),
        ("descriptors.npz", "PEFLL-R011"),
        ("checkpoints/round-00000004/manifest.json", ""),
        ("checkpoints/round-00000004/state.safetensors", ""),
        ("checkpoints/round-00000004/history.jsonl", ""),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_file_of_40_gb_is_not_read(runs, folder, capsys, name, code):
    os.truncate(folder.path / name, 40 << 30)
    with little_memory():
        if code:
            with pytest.raises(PefllError, match=rf"42,949,672,960 bytes.*{code}"):
                read_run(folder)
        else:
            assert pefll.load(folder.path).history == RunFolder(runs / "a").history()
            assert checkpoint.latest(folder.checkpoints, lambda sentence: None, folder.run_id()).round == 2
        if name == "descriptors.npz":
            assert code_of(read_descriptors, folder) == "PEFLL-O003"
        if name == "config.toml":
            assert code_of(pefll.load, folder.path) == code
            assert run_folders(folder.path)
        else:
            assert ".damaged-1" in resumed(folder, capsys)
            assert without_seconds(folder) == without_seconds(RunFolder(runs / "a"))


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 100_000)
    monkeypatch.setattr(checkpoint.tensorfile, "read", pytest.fail)
    assert code_of(pefll.load, folder.path) == "PEFLL-L009"


def test_a_line_without_an_end_is_no_evaluation():
    found = read_rows(b'{"round": 1}\n' + b"0" * (MOST_LINE + 1), "")
    assert found.rows == [{"round": 1}]
    assert "line 2 has more than" in found.damage
    assert read_rows(b"\n" * 100, "").damage.startswith("line 1 is not JSON")


@pytest.mark.parametrize("name", ["/dev/zero", "../b/summary.json"])
def test_a_summary_leads_to_no_file_elsewhere(folder, name):
    summary = json.loads(folder.summary_file.read_text())
    check = summary.pop("check")
    del check["sha256"]
    check["files"] = {name: ""}
    folder.summary_file.write_text(json.dumps(summary | {"check": check | {"sha256": digest([summary, check])}}))
    with little_memory():
        assert code_of(read_run, folder) == "PEFLL-R011"


# The rest of a folder.


def test_exchanged_folders_of_seeds_are_named(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "seed-1")
    assert code_of(run_folders, tmp_path) == "PEFLL-R013"
    (tmp_path / "seed-1").rename(tmp_path / "seed-0")
    assert [folder.path.name for folder in run_folders(tmp_path)] == ["seed-0"]


def test_a_link_in_place_of_the_lock_is_not_followed(folder, tmp_path):
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PefllError, match=r"/\.lock.*PEFLL-A102"):
        trained(folder.path, ROUNDS + 1)
    assert not (tmp_path / "elsewhere").exists()


def test_what_killed_writers_left_goes_when_the_run_goes_on(folder):
    left = [".config.toml.4242.tmp", f".summary.json.{'0' * 16}.pefll-tmp"]
    for name in left:
        (folder.path / name).write_text("half")
    (folder.checkpoints / ".building-0123").mkdir()
    (folder.path / ".mine.tmp").touch()
    trained(folder.path, ROUNDS + 1)
    assert ".mine.tmp" in names(folder)
    assert not set(left) & set(names(folder))
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["round-00000004", "round-00000005"]


def test_a_first_write_that_was_killed_is_no_reason_to_refuse_the_folder(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / f".config.toml.{'0' * 16}.pefll-tmp").write_text("half")
    trained(tmp_path, 1)
    assert RunFolder(tmp_path).summary()["rounds"] == 1


def as_of_an_earlier_version(folder: RunFolder) -> None:
    """Take all checks away but those that there always were."""
    folder.config_file.write_text(folder.config_file.read_text().partition("\n")[2])
    rows = [json.loads(line) for line in folder.history_file.read_text().splitlines()]
    folder.history_file.write_text("".join(json.dumps(row | {"check": None}) + "\n" for row in rows))
    replace_all = folder.history_file.read_text().replace(', "check": null', "")
    folder.history_file.write_text(replace_all)
    summary = json.loads(folder.summary_file.read_text())
    del summary["check"]
    folder.summary_file.write_text(json.dumps(summary))
    for path in list(folder.checkpoints.iterdir()):
        saved = checkpoint.load(path)
        checkpoint.save(
            folder.checkpoints, saved.round, saved.tensors, {k: saved.metadata[k] for k in saved.metadata if k != "run"}
        )


def test_a_run_of_an_earlier_version_loads_with_a_note_and_gets_checks_when_it_goes_on(runs, folder, capsys):
    as_of_an_earlier_version(folder)
    assert folder.run_id() == ""
    with pytest.warns(UserWarning, match="its files carry no checks"):
        old = pefll.load(folder.path)
    assert torch.equal(flat(old.server), flat(pefll.load(runs / "a").server))
    assert len(read_run(folder).history) == ROUNDS
    said = resumed(folder, capsys, ROUNDS + 1)
    assert "its files carry no checks" in said
    assert "damaged" not in said
    assert folder.run_id()
    assert len(folder.history()) == ROUNDS + 1
    replace(folder.history_file, b'"round": 2', b'"round": 3')
    assert code_of(read_run, folder) == "PEFLL-R008"


@pytest.mark.filterwarnings("error")
def test_checkpoints_of_an_earlier_version_get_the_runs_name_when_it_goes_on(folder, monkeypatch):
    as_of_an_earlier_version(folder)
    damaged = min(folder.checkpoints.iterdir()) / "manifest.json"
    damaged.write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_history", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
        with pytest.raises(RuntimeError, match="power cut"):
            trained(folder.path, ROUNDS + 1)
    (newest, _) = manifest.newest_first(folder.checkpoints)
    assert manifest.read(newest).run == {"id": folder.run_id()}
    assert damaged.read_text() == "{"
    checkpoint.latest(folder.checkpoints, pytest.fail, folder.run_id())
    trained(folder.path, ROUNDS + 1)
    assert finished_state(folder, ROUNDS + 1) is not None


@pytest.mark.parametrize("name", ["summary.json", "history.jsonl", "checkpoints/round-00000099/manifest.json"])
@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_or_a_device_in_a_run_folder_is_not_read(tmp_path, name, link):
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("rounds = 1\n")
    place.symlink_to("/dev/zero") if link else os.mkfifo(place)
    for read in (pefll.load, lambda path: read_run(RunFolder(path))):
        with pytest.raises(PefllError) as refused:
            read(tmp_path / "run")
        assert refused.value.code == "PEFLL-R017"


@pytest.mark.parametrize("parts", [500, 20_000])
def test_tables_inside_each_other_are_no_settings(tmp_path, parts):
    (tmp_path / "config.toml").write_text(".".join(["a"] * parts) + " = 1\n")
    with pytest.raises(PefllError) as refused:
        pefll.load(tmp_path)
    assert refused.value.code == "PEFLL-R001"
