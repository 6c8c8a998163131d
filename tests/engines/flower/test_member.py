"""What a client's process may remember between messages: samples as long as they are those on the disk, and no more."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Context, RecordDict

from pefll.core.errors import PefllError
from pefll.engines.flower.client import member as module
from pefll.engines.flower.client.member import DataCache, Member
from pefll.engines.flower.client.policy import Refusal
from pefll.engines.flower.protocol.agreement import Agreement
from tests.engines.flower.federations import setting


def member_of(here, client=0):
    return Member.from_context(here.grid.contexts[1000 + client])


def test_samples_are_read_once_and_again_when_their_file_changes(tmp_path, monkeypatch):
    here = setting(tmp_path)
    reads = []
    real = module.read_member
    monkeypatch.setattr(module, "_READ", DataCache(1 << 20))
    monkeypatch.setattr(module, "read_member", lambda path, **more: reads.append(path) or real(path, **more))
    before = member_of(here).federation()
    assert member_of(here).federation() is before
    assert len(reads) == 1
    with np.load(tmp_path / "client-000.npz") as file:
        arrays = dict(file)
    arrays["x"] = arrays["x"] + 1
    np.savez(tmp_path / "client-000.npz", **arrays)
    os.utime(tmp_path / "client-000.npz", ns=(1, 1))  # the same size, and clocks are coarse
    after = member_of(here).federation()
    assert len(reads) == 2
    assert torch.equal(after.x, before.x + 1)


def test_another_agreement_reads_the_samples_again(tmp_path):
    here = setting(tmp_path)
    mine = here.grid.contexts[1000]
    other = Agreement.from_config({**here.agreement.to_config(), "classes": here.agreement.classes + 1})
    theirs = Context(1, 1000, dict(mine.node_config), RecordDict(), other.to_config())
    assert Member.from_context(mine).federation().classes == here.agreement.classes
    assert Member.from_context(theirs).federation().classes == here.agreement.classes + 1


def test_a_shelf_keeps_the_last_and_forgets_what_was_used_longest_ago(tmp_path):
    federation = setting(tmp_path).federation
    size = federation.x.nbytes + federation.y.nbytes + federation.rows.nbytes
    reads = []

    def get(shelf, name):
        return shelf.get((name,), lambda: reads.append(name) or federation)

    two = DataCache(2 * size)
    for name in "abacab":  # c takes the place of b, which was used before a
        get(two, name)
    assert reads == ["a", "b", "c", "b"]
    reads.clear()
    none = DataCache(0)
    for name in "aabb":
        get(none, name)
    assert reads == ["a", "b"]


def test_data_that_is_not_there_is_one_sentence(tmp_path):
    here = setting(tmp_path)
    (tmp_path / "client-000.npz").unlink()
    with pytest.raises(PefllError, match="PEFLL-D178"):
        member_of(here).federation()


@pytest.mark.parametrize("column", ["outcome", "split", "client"])
def test_a_server_cannot_choose_labels_splits_or_clients_as_features(column, tmp_path):
    path = tmp_path / "table.csv"
    rows = [f"{i},{i % 3},{i % 2},train,0" for i in range(20)]
    path.write_text("\n".join(["a,b,outcome,split,client", *rows]))
    for names in (("a", "b"), ("a", column)):
        agreed = Agreement("fedavg", "mlp", (2,), 2, 1, {}, feature_names=names)
        node = {"name": "ann", "data": str(path), "label": "outcome", "methods": "fedavg"}
        member = Member.from_context(Context(1, 1, node, RecordDict(), agreed.to_config()))
        if column not in names:
            assert member.federation().input_shape == (2,)
            continue
        with pytest.raises(Refusal) as caught:
            member.federation()
        assert caught.value.code == "PEFLL-P014"
        assert repr(column) in str(caught.value)


def test_an_agreement_is_read_once_and_damaged_ones_are_one_sentence(tmp_path):
    config = setting(tmp_path).agreement.to_config()
    assert Agreement.from_config(config) is Agreement.from_config(dict(config))
    assert Agreement.from_config({**config, "seed": 99}).seed == 99
    for damaged in ({"settings": "{"}, {"seed": [1]}, {"input-shape": "3"}):
        with pytest.raises(PefllError, match="PEFLL-F211"):
            Agreement.from_config({**config, **damaged})


@pytest.mark.parametrize(
    "hostile",
    [
        {"settings": "[" * 100_000},
        {"settings": "[" * 40 + "]" * 40},
        {"settings": "[]"},
        {"settings": 3},
        {"class-names": f'["{"x" * (5 << 20)}"]'},
        {"class-names": "[[]]"},
        {"input-shape": "[1e999]"},
        {"input-shape": "[NaN]"},
        {"input-shape": "[-3]"},
        {"input-shape": f"[{'9' * 5000}]"},
        {"normalise": "[[NaN], [1.0]]"},
        {"normalise": "[[0.0], [1e999]]"},
        {"normalise": "[[0.0], [0.0]]"},
        {"classes": "many"},
        {"classes": -1},
        {"num-clients": 1.5},
        {"seed": "x"},
        {"model": 7},
        {"tokens": "no"},
    ],
    ids=lambda hostile: " ".join(f"{name} {str(value)[:12]}" for name, value in hostile.items()),
)
def test_a_hostile_run_config_is_one_sentence(hostile, tmp_path):
    config = setting(tmp_path, shape=(1, 16, 16), model="lenet").agreement.to_config()
    with pytest.raises(PefllError) as refused:
        Agreement.from_config({**config, **hostile})
    assert refused.value.code == "PEFLL-F211"
    assert len(str(refused.value)) < 400
