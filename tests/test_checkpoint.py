"""Checkpoints: whole or not at all, and a damaged one is noticed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Event

import pytest
import safetensors.torch
import torch

from pefll.core import tensorfile
from pefll.core.errors import PefllError
from pefll.core.tree import from_named, leaves, map_tree, named_leaves
from pefll.runs import checkpoint
from pefll.runs.checksums import digest
from tests.federations import flat

METADATA = {"problem": {"classes": 3}, "progress": {"best_value": 0.1, "words": "é"}}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"server.theta": torch.full((100,), value), "server.step": torch.tensor(7), "odd": torch.ones(3, 4).T}


def three(folder: Path) -> list[Path]:
    return [checkpoint.save(folder, round_, tensors(float(round_)), METADATA) for round_ in (10, 20, 30)]


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_is_saved_comes_back(tmp_path):
    path = checkpoint.save(tmp_path / "c", 5, tensors(0.3), METADATA)
    saved = checkpoint.load(path)
    assert saved.round == 5
    assert saved.metadata == METADATA
    assert saved.tensors.keys() == tensors(0.3).keys()
    for name, value in tensors(0.3).items():
        assert torch.equal(saved.tensors[name], value)
        assert saved.tensors[name].dtype == value.dtype


def test_tensors_of_every_type_and_shape_are_what_the_library_reads(tmp_path):
    many = {f"t.{kind}".replace("torch.", ""): torch.arange(5).float().to(kind) for kind in tensorfile.TYPES}
    many |= {"scalar": torch.tensor(-2.5), "none": torch.zeros(0, 3), 'a "name" é': torch.ones(2, 3, 1).double()}
    many |= {"odd": torch.ones(3, 4).T, "some": torch.arange(10.0)[3:7], "again": torch.arange(10.0)[::2]}
    path = checkpoint.save(tmp_path, 1, many, METADATA) / checkpoint.TENSORS
    read = safetensors.torch.load_file(path)
    assert read.keys() == many.keys()
    for name, value in many.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (read[name], value)]
        assert torch.equal(*bits)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for entry in json.loads(content[8 : 8 + length]).values():  # so that memory can be used as it lies in the file
        size = next(kind.itemsize for kind, name in tensorfile.TYPES.items() if name == entry["dtype"])
        assert (8 + length + entry["data_offsets"][0]) % size == 0
    with pytest.raises(PefllError, match=r"\bwave\b.*torch\.complex64.*PEFLL-R101"):
        checkpoint.save(tmp_path, 2, {"wave": torch.ones(2, dtype=torch.complex64)}, METADATA)
    assert entries(tmp_path) == ["round-00000001"]


def test_a_writer_writes_one_after_another_and_raises_what_went_wrong_when_it_is_waited_for(tmp_path, monkeypatch):
    writer = checkpoint.Writer(tmp_path)
    writer.wait()
    for round_ in (1, 2, 3):
        writer.begin(round_, tensors(float(round_)), METADATA)
    writer.wait()
    assert entries(tmp_path) == ["round-00000002", "round-00000003"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        writer.begin(4, tensors(4.0), METADATA)
        with pytest.raises(PefllError, match=r"round-00000004: No space left.*PEFLL-A102"):
            writer.begin(5, tensors(5.0), METADATA)
        writer.begin(6, tensors(6.0), METADATA)
        writer.close()
    writer.wait()
    assert entries(tmp_path) == ["round-00000002", "round-00000003"]


def test_what_must_be_on_the_disk_before_a_checkpoint_comes_first_and_its_errors_are_raised(tmp_path):
    seen = []

    def before() -> None:
        seen.append(entries(tmp_path))
        if len(seen) == 3:
            raise PefllError("the disk is gone")

    writer = checkpoint.Writer(tmp_path, before)
    for round_ in (1, 2, 3):
        writer.begin(round_, tensors(float(round_)), METADATA)
    with pytest.raises(PefllError, match="the disk is gone"):
        writer.wait()
    assert seen == [[], ["round-00000001"], ["round-00000001", "round-00000002"]]
    assert entries(tmp_path) == seen[-1]


def test_who_cannot_write_a_checkpoint_says_how_to_go_on(tmp_path, monkeypatch):
    for number, advice in ((errno.ENOSPC, "free some space, then go on"), (errno.EIO, "correct that, then go on")):
        error = OSError(number, os.strerror(number))
        writer = checkpoint.Writer(tmp_path, then="go on")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _, error=error: (_ for _ in ()).throw(error))
            writer.begin(4, tensors(4.0), METADATA)
            with pytest.raises(PefllError, match=rf"round-00000004: {os.strerror(number)}; {advice} \[PEFLL-A102\]$"):
                writer.wait()


def test_a_writer_lets_go_of_what_is_written_and_of_nothing_else(tmp_path, monkeypatch):
    may_write, real = Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: (may_write.wait(60), real(*arguments)))
    writer, content = checkpoint.Writer(tmp_path), tensors(1.0)
    held = weakref.ref(content["server.theta"])
    writer.begin(1, content, METADATA)
    del content
    assert writer.busy
    assert held() is not None
    may_write.set()
    writer._thread.join()
    assert not writer.busy
    assert held() is not None  # not freed by the other thread
    writer.wait()
    assert held() is None
    assert entries(tmp_path) == ["round-00000001"]


def test_the_last_two_are_kept(tmp_path):
    three(tmp_path)
    assert entries(tmp_path) == ["round-00000020", "round-00000030"]
    assert checkpoint.latest(tmp_path, pytest.fail).round == 30


def test_saving_a_round_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 10, tensors(1.0), METADATA)
    checkpoint.save(tmp_path, 10, tensors(2.0), METADATA)
    assert entries(tmp_path) == ["round-00000010"]
    assert float(checkpoint.latest(tmp_path, pytest.fail).tensors["server.theta"][0]) == 2


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", ["truncate", "append", "bit", "header", "no tensors", "no manifest", "manifest cut"])
def test_a_damaged_one_is_noticed_and_the_one_before_it_used(tmp_path, damage):
    newest = three(tmp_path)[-1]
    state, manifest = newest / checkpoint.TENSORS, newest / checkpoint.MANIFEST
    if damage == "truncate":
        state.write_bytes(state.read_bytes()[:-1])
    elif damage == "append":
        state.write_bytes(state.read_bytes() + b"x")
    elif damage == "bit":
        flip(state, -5)
    elif damage == "header":
        flip(state, 20)
    elif damage == "no tensors":
        state.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:40])
    said = []
    saved = checkpoint.latest(tmp_path, said.append)
    assert saved.round == 20
    assert float(saved.tensors["server.theta"][0]) == 20
    assert len(said) == 1
    assert "round-00000030" in said[0]
    assert said[0].endswith("it is skipped")


def test_any_flipped_bit_of_the_manifest_is_noticed_or_means_nothing(tmp_path):
    newest = three(tmp_path)[-1]
    manifest = newest / checkpoint.MANIFEST
    clean = manifest.read_bytes()
    for place in range(len(clean)):
        flip(manifest, place)
        said = []
        saved = checkpoint.latest(tmp_path, said.append)
        assert saved.round == 20 or saved.metadata == METADATA, clean[place - 5 : place + 5]
        assert bool(said) == (saved.round == 20)
        manifest.write_bytes(clean)


def test_a_manifest_of_another_kind_is_damaged(tmp_path):
    newest = three(tmp_path)[-1]
    for text in ("[]", "3", "null", '{"files": 1}', "{}"):
        (newest / checkpoint.MANIFEST).write_text(text)
        with pytest.raises(PefllError, match="PEFLL-R004"):
            checkpoint.load(newest)


def test_tensors_that_are_no_safetensors_are_damaged_even_with_the_right_sha(tmp_path):
    import hashlib

    newest = three(tmp_path)[-1]
    (newest / checkpoint.TENSORS).write_bytes(b"nonsense")
    manifest = json.loads((newest / checkpoint.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][checkpoint.TENSORS] = {"bytes": 8, "sha256": hashlib.sha256(b"nonsense").hexdigest()}
    manifest["sha256"] = digest(manifest)
    (newest / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PefllError, match="PEFLL-R004"):
        checkpoint.load(newest)


def test_none_whole_and_none_at_all_are_sentences(tmp_path):
    with pytest.raises(PefllError, match="PEFLL-R015"):
        checkpoint.latest(tmp_path / "run" / "checkpoints", pytest.fail)
    for path in three(tmp_path):
        if path.exists():
            flip(path / checkpoint.TENSORS, -1)
    with pytest.raises(PefllError, match="PEFLL-R007"):
        checkpoint.latest(tmp_path, lambda sentence: None)


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.rename", "pathlib.Path.mkdir"])
def test_a_full_disk_leaves_the_last_good_one_and_nothing_half(tmp_path, monkeypatch, where):
    three(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        with pytest.raises(PefllError, match=r"round-00000040: No space left.*PEFLL-A102"):
            checkpoint.save(tmp_path, 40, tensors(4.0), METADATA)
    assert entries(tmp_path) == ["round-00000020", "round-00000030"]
    assert checkpoint.latest(tmp_path, pytest.fail).round == 30


REALLY_FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from pefll.runs import checkpoint
from pefll.core import tensorfile
from pefll.core.errors import PefllError
folder = Path(sys.argv[1])
for round_ in (1, 2):
    checkpoint.save(folder, round_, {"theta": torch.full((1000,), float(round_))}, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    checkpoint.save(folder, 3, {"theta": torch.full((1000,), 3.0)}, {})
except PefllError as error:
    print(error)
    sys.exit(2)
"""


def test_a_write_that_the_system_really_cuts_off(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", REALLY_FULL, str(tmp_path)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write the checkpoint" in done.stdout
    assert "File too large" in done.stdout
    assert entries(tmp_path) == ["round-00000001", "round-00000002"]
    assert float(checkpoint.latest(tmp_path, pytest.fail).tensors["theta"][0]) == 2


def test_what_a_killed_process_left_behind_goes(tmp_path):
    three(tmp_path)
    (tmp_path / ".building-1").mkdir()
    (tmp_path / ".building-1" / checkpoint.TENSORS).write_bytes(b"half")
    assert checkpoint.latest(tmp_path, pytest.fail).round == 30
    checkpoint.save(tmp_path, 40, tensors(4.0), METADATA)
    assert entries(tmp_path) == ["round-00000030", "round-00000040"]


# Trees, which checkpoints hold.


def test_trees_are_walked_in_one_order_and_rebuilt_by_name():
    from pefll.methods.averaging import Update
    from pefll.methods.optim import Moments

    tree = Update(Moments(torch.zeros(2), torch.ones(1)), torch.full((3,), 2.0))
    named = dict(named_leaves(tree))
    assert list(named) == ["theta.first", "theta.second", "samples"]
    assert [leaf.tolist() for leaf in leaves(tree)] == [[0, 0], [1], [2, 2, 2]]
    again = from_named(tree, dict(reversed(named.items())))
    assert type(again) is Update
    assert type(again.theta) is Moments
    assert torch.equal(flat(again), flat(tree))
    doubled = map_tree(lambda a, b: a + b, tree, again)
    assert torch.equal(flat(doubled), 2 * flat(tree))
    assert dict(named_leaves(torch.ones(1))).keys() == {"value"}


def test_damaged_ones_that_were_passed_over_do_not_push_out_good_ones(tmp_path):
    for round_ in (1, 2):
        checkpoint.save(tmp_path, round_, {"a": torch.zeros(2)}, {})
    (tmp_path / "round-00000002" / "state.safetensors").write_bytes(b"no")
    assert checkpoint.latest(tmp_path, lambda sentence: None).round == 1
    checkpoint.set_newer_aside(tmp_path, 1, lambda sentence: None)
    checkpoint.save(tmp_path, 3, {"a": torch.zeros(2)}, {})
    assert entries(tmp_path) == ["round-00000001", "round-00000002.damaged-1", "round-00000003"]
