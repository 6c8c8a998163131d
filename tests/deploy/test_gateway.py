"""The parts of the server's two ports one by one: bounds, impatience, modes of files."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

import uvicorn
from fastapi import HTTPException
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node

from pefll.core.errors import PefllError
from pefll.deploy import connections, gateway
from pefll.deploy.certificates import make_certificates
from pefll.deploy.folder import add_client, make_federation
from pefll.deploy.ownership import Ownership
from pefll.deploy.plan import Plan
from pefll.deploy.private import make_private_folder, tighten, write_private
from pefll.deploy.superlink import OperatorAccount
from tests.deploy.attacked import reply_of, requests_for
from tests.engines.flower.federations import setting


def received(parts, limit, pause=0.0):
    """Return the kinds of messages that an app gets of a request whose content comes in parts, and what is answered."""
    waiting, sent = list(parts), []

    async def receive():
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message):
        sent.append(message)

    async def read():
        bounded_receive, bounded_send = gateway._bounded(receive, send, limit)
        kinds = []
        while waiting and "http.disconnect" not in kinds:
            kinds.append((await bounded_receive())["type"])
        if "http.disconnect" in kinds:
            kinds.append((await bounded_receive())["type"])
        await bounded_send({"type": "http.response.start", "status": 200, "headers": []})
        await bounded_send({"type": "http.response.body", "body": b"done"})
        return kinds

    return asyncio.run(read()), sent


def test_a_request_that_becomes_too_long_or_too_slow_is_ended(monkeypatch):
    kinds, sent = received([b"12345", b"67890"], 10)
    assert kinds == ["http.request"] * 2
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"done")
    kinds, sent = received([b"12345", b"678901"], 10)
    assert kinds == ["http.request", "http.disconnect", "http.disconnect"]
    assert (sent[0]["status"], sent[1]["body"], len(sent)) == (413, b"", 2)
    assert (b"connection", b"close") in sent[0]["headers"]
    monkeypatch.setattr(gateway, "IDLE_SECONDS", 0.05)
    kinds, sent = received([b"1", b"2"], 10, pause=0.5)
    assert kinds == ["http.disconnect"] * 2
    assert sent[0]["status"] == 408


def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, lifespan="off", http=connections.HeadTimeoutProtocol, log_level="error", timeout_keep_alive=2
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            for beginning in (b"", b"GET / HTTP/1.1\r\nhost:", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTT"):
                with socket.create_connection(listener.getsockname(), timeout=10) as line:
                    line.sendall(beginning)
                    answered = 0
                    while part := _read(line):
                        answered += len(part)
                assert bool(answered) == beginning.endswith(b"GET / HTT")
            with socket.create_connection(listener.getsockname(), timeout=10) as line:  # honest ones are not
                for _ in range(2):
                    line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert line.recv(1000).startswith(b"HTTP/1.1 200")
                    time.sleep(0.7)
        finally:
            server.should_exit = True
            thread.join()


def test_connections_without_tls_leave_room_and_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.5)
    make_certificates(tmp_path, ["127.0.0.1"])
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")

    async def hold_five():
        listener = connections.LimitedListener(socket.create_server(("127.0.0.1", 0)), most=3)
        listener.setblocking(False)
        place = listener.getsockname()
        heard = []
        server = await asyncio.start_server(lambda reader, writer: heard.append(writer), sock=listener, ssl=context)
        async with server:
            idle = [await asyncio.open_connection(*place) for _ in range(5)]
            began = time.monotonic()
            ends = [asyncio.create_task(_end(reader)) for reader, _ in idle]
            await asyncio.wait(ends[3:], timeout=5)
            assert [end.done() for end in ends] == [False] * 3 + [True] * 2
            await asyncio.wait(ends, timeout=10)
            assert 0.3 < time.monotonic() - began < 8, "asyncio itself waits for 60 s"
            assert all(end.done() for end in ends)
            _, writer = await asyncio.open_connection(*place, ssl=trust, server_hostname="127.0.0.1")
            writer.close()
            for _, writer in idle:
                writer.close()

    with asyncio.Runner(loop_factory=connections.HandshakeTimeoutLoop) as runner:
        runner.run(hold_five())


async def _end(reader):
    with suppress(ConnectionError):
        await reader.read()


def _read(line):
    try:
        return line.recv(1000)
    except ConnectionResetError:
        return b""


def test_nodes_get_at_their_own_messages_alone():
    tree = ObjectTree(object_id="message", children=[ObjectTree(object_id="part")])
    handlers = SimpleNamespace(
        pull_messages=lambda request, **_: PullMessagesResponse(message_object_trees=[tree]),
        push_messages=lambda request, **_: PushMessagesResponse(session_id="transfer"),
        pull_object=lambda request, **_: "content",
        push_object=lambda request, **_: "stored",
        confirm_message_received=lambda request, **_: "confirmed",
    )
    Ownership().guard(handlers)
    alice, bob = Node(node_id=1001), Node(node_id=1002)
    handlers.pull_messages(PullMessagesRequest(node=alice), state=None)
    handlers.push_messages(reply_of(alice), state=None)

    def calls(node):
        asked = requests_for(node, "part", "transfer", "message")
        return [partial(getattr(handlers, name.replace("-", "_")), asked[name], state=None) for name in asked]

    assert [call() for call in calls(alice)] == ["content", "stored", "confirmed"]
    others = [
        *calls(bob),
        lambda: handlers.push_messages(reply_of(bob, src_node_id=alice.node_id)),
        lambda: handlers.push_object(requests_for(alice, "part")["push-object"]),  # Flower would look for a transfer
    ]
    for call in others:
        with pytest.raises(HTTPException):
            call()


def test_a_reply_with_a_time_that_cannot_be_is_refused_before_it_is_stored():
    stored = []

    def push_messages(request, **_):
        if request.messages_list[0].metadata.run_id == 7:
            raise KeyError(7)
        stored.append(request)
        return PushMessagesResponse(session_id="transfer")

    others = dict.fromkeys(("pull_messages", "pull_object", "push_object", "confirm_message_received"))
    handlers = SimpleNamespace(push_messages=push_messages, **others)
    Ownership().guard(handlers)
    node, nan = Node(node_id=1001), float("nan")
    handlers.push_messages(reply_of(node))
    handlers.push_messages(reply_of(node, ttl=-1.0))  # late; Flower drops it
    bad = [reply_of(node, ttl=value) for value in (nan, float("inf"), -1e18, 1e9)]
    bad += [reply_of(node, created_at=value) for value in (nan, float("-inf"), -1e18, 0.0, 1e12)]
    for value in (nan, float("inf"), -1.0, 1e9):
        bad.append(reply_of(node))
        bad[-1].clientapp_runtime_list[0] = value
    without_a_tree = reply_of(node)
    del without_a_tree.message_object_trees[:]
    bad += [PushMessagesRequest(node=node), without_a_tree, reply_of(node, run_id=7)]
    for request in bad:
        with pytest.raises(HTTPException) as refused:
            handlers.push_messages(request)
        assert refused.value.status_code == 400
    assert len(stored) == 2


def test_one_account_has_the_secret():
    account = OperatorAccount("secret")
    assert account.validate_tokens_in_metadata([("token", "secret")])[0]
    for metadata in ([], [("token", "")], [("token", "wrong")], [("token", "secret"), ("token", "secret")]):
        assert account.validate_tokens_in_metadata(metadata) == (False, None)


class TestModes:
    @pytest.fixture(autouse=True)
    def _everything_for_everybody(self):
        before = os.umask(0)
        yield
        os.umask(before)

    def test_a_federation_is_its_owners(self, tmp_path):
        here = setting(tmp_path, clients=2)
        folder = tmp_path / "fed"
        make_federation(folder, Plan(here.agreement, ("alice", "bob")), "127.0.0.1:8000")
        add_client(folder, "carol")
        assert not [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]

    def test_what_is_another_users_is_left_alone(self, tmp_path, monkeypatch):
        here = setting(tmp_path, clients=2)
        folder = tmp_path / "fed"
        folder.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
        with pytest.raises(PefllError) as told:
            make_federation(folder, Plan(here.agreement, ("alice", "bob")), "127.0.0.1:8000")
        assert told.value.code == "PEFLL-F302"
        assert list(folder.iterdir()) == []
        with pytest.raises(PefllError) as told:
            tighten(folder)
        assert told.value.code == "PEFLL-F302"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o777
        folder.chmod(0o700)
        assert tighten(folder) == []

    def test_what_was_loose_is_tightened(self, tmp_path):
        place = tmp_path / "old"
        (place / "state").mkdir(parents=True)
        (place / "node.key").write_bytes(b"")
        (tmp_path / "elsewhere").write_bytes(b"")
        (place / "link").symlink_to(tmp_path / "elsewhere")
        assert tighten(place) == [place, place / "state", place / "node.key"]
        assert tighten(place) == []
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (place, *place.iterdir())}
        assert (modes["old"], modes["state"], modes["node.key"]) == (0o700, 0o700, 0o600)
        assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o666

    def test_a_private_file_replaces_a_link_and_does_not_follow_it(self, tmp_path):
        (tmp_path / "target").write_bytes(b"old")
        (tmp_path / "file").symlink_to(tmp_path / "target")
        write_private(tmp_path / "file", b"new")
        assert (tmp_path / "target").read_bytes() == b"old"
        assert not (tmp_path / "file").is_symlink()
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "target"]

    def test_a_file_that_is_removed_meanwhile_is_passed_over(self, tmp_path, monkeypatch):
        place = tmp_path / "it"
        place.mkdir(mode=0o700)
        for name in ("gone.tmp", "kept"):
            (place / name).write_text("")
            (place / name).chmod(0o644)
        real = Path.lstat

        def lstat(path):
            if path.name == "gone.tmp":
                path.unlink(missing_ok=True)
            return real(path)

        monkeypatch.setattr(Path, "lstat", lstat)
        assert tighten(place) == [place / "kept"]

    def test_a_folder_that_cannot_be_made_is_one_sentence(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(PefllError, match="PEFLL-A102"):
            make_private_folder(tmp_path / "file" / "folder")
