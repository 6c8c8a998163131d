"""Files that are whole or not there."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from pefll.core import files
from pefll.core.errors import PefllError, unknown
from pefll.core.files import (
    check_file_name,
    check_folder,
    is_temporary,
    make_folder,
    parse_json,
    read_json,
    read_limited,
    safe_file_name,
    sentences_for_disk_errors,
    set_aside,
    sweep,
    write_csv,
    write_json,
    write_whole,
)


def test_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    write_whole(path, b"old and long")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PefllError, match=r"pipe.*PEFLL-A103"):
        write_whole(pipe, b"new")
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("when", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_a_sentence(tmp_path, monkeypatch, when):
    path = tmp_path / "a.bin"
    write_whole(path, b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"os.{when}" if when == "fsync" else "pathlib.Path.replace", full)
    with pytest.raises(PefllError, match=r"a\.bin: No space left on device.*PEFLL-A102"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_reader_never_sees_a_part(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_whole(path, b"old")
    seen = []
    replace = type(path).replace
    monkeypatch.setattr(type(path), "replace", lambda self, to: seen.append(to.read_bytes()) or replace(self, to))
    write_whole(path, b"new" * 1000)
    assert seen == [b"old"]


@pytest.mark.parametrize(("number", "matters"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_is_no_reason_to_fail(tmp_path, monkeypatch, number, matters):
    sync = os.fsync

    def fails_for_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fails_for_folders)
    with pytest.raises(PefllError, match=f"{os.strerror(number)}.*PEFLL-A102") if matters else nullcontext():
        write_whole(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path", [".", "/", "", "..", "a/.."])
def test_a_path_without_a_files_name_is_a_sentence(path):
    with pytest.raises(PefllError, match="PEFLL-A109"):
        write_whole(Path(path), b"x")


def test_writing_into_no_folder_is_a_sentence(tmp_path):
    with pytest.raises(PefllError, match=r"gone.a: No such file or directory.*PEFLL-A102"):
        write_whole(tmp_path / "gone" / "a", b"x")


def test_folders_are_checked_without_being_made(tmp_path):
    file, new = tmp_path / "file", tmp_path / "a" / "b"
    file.touch()
    check_folder(new)
    assert not new.parent.exists()
    make_folder(new)
    make_folder(new)
    assert new.is_dir()
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    for use in (check_folder, make_folder):
        for path in (file, file / "x", tmp_path / "broken"):
            with pytest.raises(PefllError, match=rf"{path}: Not a directory.*PEFLL-A102"):
                use(path)


def test_a_folder_that_may_not_be_written_into_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # for root every folder is open
    with pytest.raises(PefllError, match=r"new: Permission denied.*PEFLL-A102"):
        check_folder(tmp_path / "new")


def test_an_error_without_words_still_makes_a_sentence():
    with pytest.raises(PefllError, match=r"it: odd.*PEFLL-A102"), sentences_for_disk_errors("it"):
        raise OSError("odd")


def test_json(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": [1, 2.5, None, "é"]})
    assert read_json(path) == {"b": [1, 2.5, None, "é"]}
    assert json.loads(path.read_text()) == read_json(path)
    path.write_text('{"b": [1,')
    with pytest.raises(PefllError, match="PEFLL-A105"):
        read_json(path)
    with pytest.raises(PefllError, match="PEFLL-A104"):
        read_json(tmp_path / "c.json")


def test_lists_of_whole_numbers_take_one_line(tmp_path):
    path = tmp_path / "a.json"
    content = {"a": [1, -2, 30], "b": [[1], [2, 3]], "c": [], "d": [1, "[\n 1,\n 2\n]"], "e": [0.5, 1], "f": {"g": [7]}}
    write_json(path, content)
    assert read_json(path) == content
    assert '"a": [1, -2, 30],\n' in path.read_text()
    assert '"g": [7]\n' in path.read_text()


def test_csv(tmp_path):
    write_csv(tmp_path / "a.csv", ({"name": name, "n": n} for n, name in enumerate(["x", 'a "b", c'])))
    assert (tmp_path / "a.csv").read_text() == 'name,n\nx,0\n"a ""b"", c",1\n'
    write_csv(tmp_path / "b.csv", [])
    assert (tmp_path / "b.csv").read_text() == ""


def test_unknown_names_are_answered_with_the_nearest_one():
    assert str(unknown("method", "pefl", ["pefll", "fedavg"])) == (
        "unknown method 'pefl': did you mean 'pefll'? known are fedavg, pefll [PEFLL-A101]"
    )
    assert "did you mean" not in str(unknown("method", "zzz", ["pefll"]))
    assert "did you mean 'client_lr'?" in str(unknown("hyper-parameter", "lr", ["client_lr", "local_steps"]))
    sentence = str(unknown("hyper-parameter", "num_rounds", ["local_steps"], also=["rounds"]))
    assert "did you mean 'rounds'? known are local_steps [" in sentence


def test_a_file_beyond_the_limit_names_the_limit():
    sentence = r"it: File too large.*`ulimit -f`.*PEFLL-A102"
    with pytest.raises(PefllError, match=sentence), sentences_for_disk_errors("it"):
        raise OSError(errno.EFBIG, "File too large")


def test_a_link_under_a_guessed_name_is_not_followed(tmp_path, monkeypatch):
    mine, target, opened = tmp_path / "mine.txt", tmp_path / "config.toml", {}
    mine.write_bytes(b"precious")
    (tmp_path / f".config.toml.{os.getpid()}.tmp").symlink_to(mine)  # what such files were called once
    really_open = os.open

    def noted(path, flags, *arguments, **words):
        if flags & os.O_CREAT:
            assert path not in opened  # two writers never share a name
            opened[path] = flags
        return really_open(path, flags, *arguments, **words)

    monkeypatch.setattr(os, "open", noted)
    for _ in range(100):
        write_whole(target, b"new")
    assert mine.read_bytes() == b"precious"
    assert target.read_bytes() == b"new"
    assert len(opened) == 100
    for path, flags in opened.items():
        assert is_temporary(path.name)
        assert flags & os.O_EXCL
        assert flags & os.O_NOFOLLOW
    # 64 random bits: no digit is the same in all names.
    assert all(len(set(digits)) > 1 for digits in zip(*(path.name.split(".")[-2] for path in opened), strict=True))


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_limited(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="it has 5 bytes, but at most 4 are allowed"):
        read_limited(tmp_path / "a", 4)
    with pytest.raises(PefllError, match=r"\b5 bytes.*PEFLL-A105"):
        read_json(tmp_path / "a", 4)


def test_a_file_that_is_there_is_never_taken_for_a_temporary_one(tmp_path, monkeypatch):
    mine, names = tmp_path / "mine.txt", iter(["0" * 16, "1" * 16])
    mine.write_bytes(b"precious")
    (tmp_path / f".a.{'0' * 16}.pefll-tmp").symlink_to(mine)
    monkeypatch.setattr("secrets.token_hex", lambda size: next(names))
    write_whole(tmp_path / "a", b"new")
    assert mine.read_bytes() == b"precious"
    assert (tmp_path / "a").read_bytes() == b"new"
    assert not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("name", ["x" * 255, "\u00e9" * 127])
def test_a_name_may_be_as_long_as_the_disk_allows(tmp_path, name):
    write_whole(tmp_path / name, b"new")
    assert os.listdir(tmp_path) == [name]


def test_a_link_in_a_files_place_is_replaced(tmp_path):
    (tmp_path / "mine.txt").write_bytes(b"precious")
    (tmp_path / "a").symlink_to(tmp_path / "mine.txt")
    write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "mine.txt").read_bytes() == b"precious"
    assert not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize(("private", "wanted"), [(False, 0o640), (True, 0o600)])
def test_the_umask_is_honoured_and_a_secret_is_its_owners(tmp_path, private, wanted):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"new", private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == wanted


KILLED = """
import os, signal, sys
from pathlib import Path
from pefll.core import files
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
files.write_whole(Path(sys.argv[1]), b"half")
"""


def test_what_a_killed_writer_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")])
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert is_temporary(left.name)
    living, handle = files._open_temporary(tmp_path / "b", 0o666)
    (tmp_path / ".notes.tmp").touch()  # somebody else's
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, ".notes.tmp"])
    os.close(handle)
    write_whole(tmp_path / "c", b"")  # the first time that this process writes here
    assert sorted(os.listdir(tmp_path)) == [".notes.tmp", "c"]


def test_a_temporary_file_that_was_swept_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock, times = fcntl.flock, []

    def swept_first(handle, how):
        if how == fcntl.LOCK_EX and not times:
            times.append(1)
            sweep(tmp_path)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    write_whole(tmp_path / "a", b"whole")
    assert times
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_damaged_is_renamed_and_nothing_is_lost(tmp_path):
    for number in (1, 2):
        (tmp_path / "a").write_text(str(number))
        assert set_aside(tmp_path / "a").name == f"a.damaged-{number}"
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    assert set_aside(tmp_path / "b").is_symlink()
    assert (tmp_path / "a.damaged-1").read_text() == "1"
    (tmp_path / "a").write_text("3")
    assert set_aside(tmp_path / "a", "earlier").name == "a.earlier-1"


ODD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "CON",
    "nul",
    "aux.txt",
    "Com1",
    "LPT9.x",
    "a.",
    "a ",
    " a",
    "a/b",
    "a\\b",
    "a:b",
]


# Letters in another order or of another width than they look, and further names of devices.
DISGUISED = ["a\u202eb", "a\u200bb", "\ufeffa", "a\u2028b", "\uff23\uff2f\uff2e", "clock$", "CLOCK$.txt", "con .txt"]


@pytest.mark.parametrize("name", [*ODD_NAMES, *DISGUISED, "a\nb", "a\x00b", "a\x7f", "q?", "\udc80", "x" * 300])
def test_names_that_are_no_files_everywhere(name):
    with pytest.raises(PefllError) as error:
        check_file_name(name, "a client's name")
    assert error.value.code == "PEFLL-R012"
    check_file_name(safe_file_name(name), "a client's name")


def test_every_text_has_a_file_name_of_its_own():
    texts = [
        *ODD_NAMES,
        "bob",
        "Bob",
        "BOB",
        "bob ",
        "b\u00f6b",
        "bo\u0308b",
        "\udc80",
        "../bob",
        "x" * 1000,
        "x" * 1001,
    ]
    texts.append(safe_file_name("Bob"))  # somebody who calls himself what another one's file is called
    names = [safe_file_name(text) for text in texts]
    assert len({name.lower() for name in names}) == len(texts)
    assert safe_file_name("bob") == "bob"
    for name in names:
        check_file_name(name, "a file's name")
        assert name.isascii()


def test_cells_that_begin_a_formula_are_text(tmp_path):
    cells = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\t1", "-0.5", "+3", "-inf", "a=1", ""]
    rows = [{"=name": cell, "n": -1.5} for cell in cells]
    write_csv(tmp_path / "a.csv", rows)
    with (tmp_path / "a.csv").open(newline="") as file:
        heading, *read = list(csv.reader(file))
    assert heading == ["'=name", "n"]
    assert [row[0] for row in read] == [f"'{cell}" for cell in cells[:7]] + cells[7:]
    assert {row[1] for row in read} == {"-1.5"}


def test_a_formula_behind_spaces_or_in_wide_letters_is_text(tmp_path):
    cells = [" =1", "\n=1", "\u00a0 @a", "\uff1d1+1", "\u200b=1", "\ufeff+a", "\ufe66a", "\0=1", " -a", "\n-1"]
    plain = [" -0.5", " 1", "a =1", "\uff21", " ", "\n", "caf\u00e9"]
    write_csv(tmp_path / "a.csv", [{"name": cell} for cell in cells + plain])
    with (tmp_path / "a.csv").open(newline="") as file:
        _, *read = list(csv.reader(file))
    assert [row[0] for row in read] == [f"'{cell}" for cell in cells] + plain


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b'{"a": ', b""])
def test_json_that_is_none_is_a_sentence(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(PefllError, match="PEFLL-A105"):
        read_json(tmp_path / "a.json")


def test_json_may_have_so_many_brackets_inside_each_other():
    assert parse_json('["[[[", {"a": "]"}]', 2) == ["[[[", {"a": "]"}]
    assert parse_json(b"[[]]") == [[]]
    for text, depth in (("[[[]]]", 2), ('[{"a": []}]', 2), ("[" * 100_000, 5), ("[" * 100_000, None)):
        with pytest.raises(ValueError, match="brackets"):
            parse_json(text, depth)
