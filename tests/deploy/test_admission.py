"""Only keys that are in the folder may exist in Flower's database, now and after a restart."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.constant import NodeStatus
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

from pefll.deploy.admission import Admission
from pefll.deploy.certificates import make_node_key, public_key_as_pem


@pytest.fixture
def keys(tmp_path):
    for name in ("alice", "bob"):
        make_node_key(tmp_path / "private" / name, tmp_path / "keys" / f"{name}.pub")
    return tmp_path / "keys"


def opened(tmp_path):
    """Return Flower's database as a server that starts finds it."""
    return get_objectstore_linkstate_factories(str(tmp_path / "superlink.db"), get_federation_manager())[1].state()


def stranger(tmp_path, state, name, number=0):
    """Register a key as anybody could on the clients' port of Flower."""
    path = tmp_path / f"{name}-{number}"
    make_node_key(path, path.with_suffix(".pub"))
    key = public_key_as_pem(path.with_suffix(".pub"))
    return key, state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 30, name=name)


def registered(state):
    return {node.public_key: node.name for node in state.get_node_info() if node.status != NodeStatus.UNREGISTERED}


def in_folder(keys):
    return {public_key_as_pem(path): path.stem for path in keys.glob("*.pub")}


def test_fake_keys_are_removed_and_stay_so_after_a_restart(tmp_path, keys):
    state = opened(tmp_path)
    fakes = [stranger(tmp_path, state, "alice", number) for number in range(5)]
    said: list[str] = []
    admission = Admission(keys, state, said.append)
    change = admission.update()
    assert change == (["alice", "bob"], ["alice"] * 5)
    assert len([line for line in said if "'alice' is not in" in line]) == 5
    for found in (state, opened(tmp_path)):
        assert registered(found) == in_folder(keys)
        for key, node in fakes:
            assert found.get_node_id_by_public_key(key) is None
            assert admission.name_of(key) is None
            assert not found.activate_node(node, 30)
    assert Admission(keys, opened(tmp_path), said.append).update() == ([], [])


def test_the_folder_is_followed_while_the_server_runs(tmp_path, keys):
    state = opened(tmp_path)
    admission = Admission(keys, state, print)
    admission.update()
    assert not admission.has_changed()
    bob = public_key_as_pem(keys / "bob.pub")
    node = state.get_node_id_by_public_key(bob)
    (keys / "bob.pub").rename(tmp_path / "bob.pub")
    assert admission.has_changed()
    assert admission.update() == ([], ["bob"])
    assert state.get_node_id_by_public_key(bob) is None
    (tmp_path / "bob.pub").rename(keys / "robert.pub")  # it is back, under another name
    assert admission.update() == (["robert"], [])
    assert state.get_node_id_by_public_key(bob) == node
    assert registered(state) == in_folder(keys)


def test_a_key_that_is_replaced_in_place_is_valid_no_more(tmp_path, keys, monkeypatch):
    monkeypatch.setattr("pefll.deploy.admission._SCAN_SECONDS", 0.0)
    state = opened(tmp_path)
    admission = Admission(keys, state, print)
    admission.update()
    old = public_key_as_pem(keys / "bob.pub")
    make_node_key(tmp_path / "private" / "new", tmp_path / "new.pub")
    (keys / "bob.pub").write_bytes((tmp_path / "new.pub").read_bytes())  # the folder's own time stays
    assert admission.has_changed()
    assert admission.update() == (["bob"], ["bob"])
    assert admission.name_of(old) is None
    assert registered(state) == in_folder(keys)
    assert not admission.has_changed()


def test_a_look_that_the_database_did_not_follow_is_made_again(tmp_path, keys, monkeypatch):
    state = opened(tmp_path)
    admission = Admission(keys, state, print)
    with monkeypatch.context() as broken:
        broken.setattr(Admission, "_unregister_others", lambda self: (_ for _ in ()).throw(OSError("locked")))
        with pytest.raises(OSError, match="locked"):
            admission.update()
    assert admission.has_changed()
    assert admission.update() == (["alice", "bob"], [])
    assert not admission.has_changed()


def test_a_key_that_two_files_have_lets_nobody_in(tmp_path, keys):
    (keys / "carol.pub").write_bytes((keys / "bob.pub").read_bytes())
    (keys / "dave.pub").write_text("no key")
    said: list[str] = []
    state = opened(tmp_path)
    admission = Admission(keys, state, said.append)
    assert admission.update() == (["alice"], [])
    assert admission.admitted == 1, "of four files"
    assert set(registered(state).values()) == {"alice"}
    assert any("bob and carol have the same key" in line for line in said)
    assert any("dave.pub is not a node's public key" in line for line in said)
