"""Files that are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import nullcontext

import pytest

from pefll.errors import PefllError, unknown
from pefll.files import (
    check_folder,
    make_folder,
    read_json,
    sentences_for_disk_errors,
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
    with pytest.raises(PefllError, match="pipe: it is a device or a pipe, not a file; choose another place"):
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
    with pytest.raises(PefllError, match=r"cannot write .*a\.bin: No space left on device; free some space"):
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
    with pytest.raises(PefllError, match=os.strerror(number)) if matters else nullcontext():
        write_whole(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_writing_into_no_folder_is_a_sentence(tmp_path):
    with pytest.raises(PefllError, match=r"cannot write .*gone.a: No such file or directory"):
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
            with pytest.raises(PefllError, match=rf"cannot write {path}: Not a directory; choose another place"):
                use(path)


def test_a_folder_that_may_not_be_written_into_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # for root every folder is open
    with pytest.raises(PefllError, match=r"cannot write .*new: Permission denied; choose another place"):
        check_folder(tmp_path / "new")


def test_an_error_without_words_still_makes_a_sentence():
    with pytest.raises(PefllError, match="cannot write it: odd"), sentences_for_disk_errors("it"):
        raise OSError("odd")


def test_json(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": [1, 2.5, None, "é"]})
    assert read_json(path) == {"b": [1, 2.5, None, "é"]}
    assert json.loads(path.read_text()) == read_json(path)
    path.write_text('{"b": [1,')
    with pytest.raises(PefllError, match="is damaged"):
        read_json(path)
    with pytest.raises(PefllError, match="there is no"):
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
        "unknown method 'pefl': did you mean 'pefll'? known are fedavg, pefll"
    )
    assert "did you mean" not in str(unknown("method", "zzz", ["pefll"]))


def test_a_file_beyond_the_limit_names_the_limit():
    sentence = "cannot write it: File too large; raise the limit that `ulimit -f` shows"
    with pytest.raises(PefllError, match=sentence), sentences_for_disk_errors("it"):
        raise OSError(errno.EFBIG, "File too large")
