"""What strangers, other clients and other users of a machine can do to a federation: nothing.

One server and one client, as processes, made under umask 0; every attack is made against these two.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.cli.build import build_fab_from_disk
from flwr.cli.typing import SuperLinkConnection
from flwr.cli.utils import init_http_client_from_connection
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER, TASK_TOKEN_HEADER
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient

from pefll.deploy import gateway
from pefll.deploy.certificates import make_node_key, public_key_as_pem
from pefll.deploy.processes import environment, free_port, run_command, wait_for_server
from tests.deploy.attacked import ASLEEP, RUNNING, Attacked, family, listens_at, reply_of, requests_for, wait_for
from tests.engines.flower.deployment import deploy, start_client
from tests.engines.flower.federations import setting

CONTROL = [f"/v1/control/{name}" for name in ("list-nodes", "register-node", "start-run", "stop-run", "list-runs")]
RUNTIME = [f"/v1/runtime/{name}" for name in ("acquire-task", "pull-task-input", "create-task", "responses")]
OTHERS = ["/", "/health", "/docs", "/openapi.json", "/v1/fleet/register-node", "/v1/fleet/unregister-node"]
TRICKS = [
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "//v1/control/list-nodes",
    "/v1/fleet/pull-messages/../../control/list-nodes",
    "/v1%2fcontrol/list-nodes",
    "/V1/CONTROL/LIST-NODES",
    "/v1/fleet/pull-messages/",
]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    place = tmp_path_factory.mktemp("strangers")
    with ExitStack() as stack:
        before = os.umask(0)
        try:
            here = setting(place, clients=2)
            there = stack.enter_context(deploy(here, place / "p"))
            start_client(there, here, 0)  # both take seconds to load, and a client waits for its server
            there.start_server()
        finally:
            os.umask(before)
        wait_for(lambda: "Activated" in there.log("server"), there)
        yield Attacked(there)


def control(attacked, address, home, monkeypatch):
    """Return Flower's own client of the control interface, with the credentials of a home."""
    monkeypatch.setattr(
        "flwr.supercore.credential_store.file_credential_store.CREDENTIAL_FILE_PATH", home / "credentials.yaml"
    )
    return init_http_client_from_connection(
        SuperLinkConnection(name="x", address=address, root_certificates=str(attacked.authority))
    )


class TestStrangers:
    """Whoever has the address and ca.crt."""

    def test_nothing_but_clients_routes_is_there(self, attacked):
        for path in CONTROL + RUNTIME + OTHERS + TRICKS:
            for method in ("POST", "GET"):
                assert attacked.ask(path, method=method) == (404, b""), path

    def test_the_operators_secret_is_worth_nothing_there(self, attacked):
        headers = {"authorization": f"Bearer {attacked.token}"}
        assert attacked.ask("/v1/control/list-nodes", headers) == (404, b"")

    def test_clients_routes_need_a_known_key(self, attacked, tmp_path):
        make_node_key(tmp_path / "own.key", tmp_path / "own.pub")
        own = load_ssh_private_key((tmp_path / "own.key").read_bytes(), None)
        stolen = attacked.signed(attacked.key()) | {
            FLEET_HTTP_SIGNATURE_HEADER: attacked.signed(own)[FLEET_HTTP_SIGNATURE_HEADER]
        }
        old = attacked.signed(attacked.key(), datetime.now(UTC) - timedelta(hours=1))
        for route in gateway.FLEET:
            assert attacked.ask(route)[0] == 401
            assert attacked.ask(route, attacked.signed(own))[0] == 401
            assert attacked.ask(route, stolen)[0] == 401
            assert attacked.ask(route, old)[0] == 401

    def test_flowers_own_commands_fail(self, attacked, tmp_path, monkeypatch):
        make_node_key(tmp_path / "own.key", tmp_path / "own.pub")
        commands = control(attacked, attacked.there.address, tmp_path, monkeypatch)
        fab = fab_to_proto(Fab("hash", build_fab_from_disk(attacked.there.folder), {}))
        key = public_key_as_pem(tmp_path / "own.pub")
        for call, request in (
            (commands.ListNodes, ListNodesRequest()),
            (commands.RegisterNode, RegisterNodeRequest(public_key=key, name=RUNNING)),
            (commands.StartRun, StartRunRequest(fab=fab)),
            (commands.StopRun, StopRunRequest(run_id=1)),
        ):
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                call(request)
        commands.close()
        runtime = RuntimeHttpClient.from_server_address(
            server_address=attacked.there.address,
            insecure=False,
            root_certificates=attacked.authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        )
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        runtime.close()

    def test_what_is_long_is_not_read(self, attacked):
        route, known = "/v1/fleet/pull-messages", attacked.signed(attacked.key())
        # TLS carries 16 KB in a piece, so that the parser in front of the gateway gets no more than it allows at once.
        assert attacked.ask(route, known | {"x": "y" * gateway.MOST_HEAD_BYTES})[0] == 431
        assert attacked.ask(f"{route}?{'y' * gateway.MOST_HEAD_BYTES}", known)[0] == 431
        assert attacked.ask(route, known | {"content-length": str(17 << 20)})[0] == 413
        began = time.monotonic()
        assert attacked.ask("/v1/fleet/push-object", {"content-length": "1000000000"})[0] == 401
        assert time.monotonic() - began < 15, "no byte of the content is waited for"

    def test_what_has_no_end_is_cut_off_and_takes_no_memory(self, attacked):
        headers = attacked.signed(attacked.key()) | {"host": "x", "content-type": "application/protobuf"}
        known = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        post, version, piece = b"POST /v1/fleet/pull-messages", b" HTTP/1.1\r\n" + known, b"y" * (64 << 10)
        chunked, chunk = b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (len(piece), piece)
        began = attacked.memory("VmRSS")
        for head, part, status in (
            (post + b"?", piece, b"400"),
            (post + version + b"x: ", piece, b"400"),
            (post + version, b"x: y\r\n" * (8 << 10), b"400"),
            (post + version + chunked, chunk, b"413"),
        ):
            taken, answer = attacked.pour(head, part, 256 << 20)
            # Who goes on writing while the connection is closed may miss the answer.
            assert answer == b"" or answer.startswith(b"HTTP/1.1 " + status), answer
            assert taken < 64 << 20, "16 MB of content are the most, with what is under way"
        assert attacked.memory("VmHWM") - began < 64 << 20


class TestOtherUsersOfTheServersMachine:
    """Whoever reaches its loopback, and cannot read what is the operator's."""

    def test_commands_need_the_secret(self, attacked):
        for path in (*CONTROL, "/v1/control/get-login-details", "/v1/control/refresh-auth-tokens"):
            for token in ("", "Bearer", "Bearer x", "Basic x", f"Bearer {attacked.token[:-1]}"):
                headers = {"authorization": token} if token else {}
                assert attacked.ask(path, headers, address=attacked.own_address)[0] == 401, path

    def test_the_servers_app_needs_its_token_and_nobody_gets_one(self, attacked):
        ask = {"address": attacked.own_address}
        for path in ("/v1/runtime/acquire-task", "/v1/runtime/create-task", "/v1/runtime/responses", *OTHERS):
            assert attacked.ask(path, **ask) == (404, b"")
            assert attacked.ask(path, {"authorization": f"Bearer {attacked.token}"}, **ask) == (404, b"")
        content = PullTaskInputRequest().SerializeToString()
        for route in gateway.RUNTIME:
            for headers in ({}, {TASK_TOKEN_HEADER: "0" * 64}, {"authorization": f"Bearer {attacked.token}"}):
                assert attacked.ask(route, headers, content, **ask)[0] == 401
        assert attacked.ask("/v1/fleet/pull-messages", attacked.signed(attacked.key()), **ask) == (404, b"")

    def test_the_operator_can_command_and_cannot_let_in_a_key_that_is_not_in_the_folder(
        self, attacked, tmp_path, monkeypatch
    ):
        commands = control(attacked, attacked.own_address, attacked.there.home, monkeypatch)
        nodes = {node.name: node.public_key for node in commands.ListNodes(ListNodesRequest()).nodes_info}
        assert nodes == {
            name: public_key_as_pem(attacked.there.folder / "keys" / f"{name}.pub") for name in (RUNNING, ASLEEP)
        }
        make_node_key(tmp_path / "own.key", tmp_path / "own.pub")
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            commands.RegisterNode(RegisterNodeRequest(public_key=public_key_as_pem(tmp_path / "own.pub"), name=RUNNING))
        commands.close()

    def test_nothing_is_readable_for_others_whatever_the_umask(self, attacked):
        there = attacked.there
        places = [there.logs, there.home, there.folder]
        loose = [
            f"{path}: {stat.S_IMODE(path.stat().st_mode):o}"
            for place in places
            for path in (place, *place.rglob("*"))
            if path.stat().st_mode & 0o077
        ]
        assert not loose
        found = {path.relative_to(there.folder.parent).as_posix() for place in places for path in place.rglob("*")}
        secret = {"home/superlink.db", "home/credentials.yaml", "fed/server/ca.key", f"fed/clients/{RUNNING}/node.json"}
        assert secret < found

    def test_argument_lists_say_nothing_and_no_client_listens(self, attacked):
        for name, process in attacked.there.running.items():
            for pid in family(process.pid):
                words = Path(f"/proc/{pid}/cmdline").read_text()
                assert attacked.token not in words
                assert ".npz" not in words
            listening = [place for pid in family(process.pid) for place in listens_at(pid)]
            assert len(listening) == (2 if name == "server" else 0), f"{name} listens at {listening}"


class TestAnotherClient:
    """A registered client, with its own key, at other clients' messages."""

    @pytest.fixture
    def node(self, attacked):
        key = attacked.key()
        request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=30)
        assert attacked.fleet("activate-node", request)[0] in (200, 412)  # it may be active from an earlier test
        with sqlite3.connect(attacked.there.home / "superlink.db") as database:
            rows = dict(database.execute("select name, node_id from node").fetchall())
        return {name: Node(node_id=number % (1 << 64)) for name, number in rows.items()}

    def test_it_can_ask_for_its_own_messages(self, attacked, node):
        assert attacked.fleet("pull-messages", PullMessagesRequest(node=node[ASLEEP]))[0] == 200
        assert attacked.ask("/v1/control/list-nodes", attacked.signed(attacked.key())) == (404, b"")

    def test_it_cannot_speak_for_another(self, attacked, node):
        assert attacked.fleet("pull-messages", PullMessagesRequest(node=node[RUNNING]))[0] == 401
        for source in (node[RUNNING].node_id, SUPERLINK_NODE_ID):
            words = {"run_id": 1, "src_node_id": source, "dst_node_id": node[RUNNING].node_id, "message_type": "query"}
            assert attacked.fleet("push-messages", reply_of(node[ASLEEP], **words))[0] == 403
            order = reply_of(node[ASLEEP], **words, reply_to_message_id="")
            assert attacked.fleet("push-messages", order)[0] == 403

    def test_it_cannot_touch_what_it_was_not_given(self, attacked, node):
        name = "0" * 64
        for route, request in requests_for(node[ASLEEP], name, message=name).items():
            assert attacked.fleet(route, request)[0] == 403

    def test_a_key_that_is_taken_out_of_the_folder_is_locked_out_at_once(self, attacked, node):
        public = attacked.there.folder / "keys" / f"{ASLEEP}.pub"
        aside = public.with_suffix(".aside")
        request = PullMessagesRequest(node=node[ASLEEP])
        assert attacked.fleet("pull-messages", request)[0] == 200
        public.rename(aside)
        assert attacked.fleet("pull-messages", request)[0] == 401
        aside.rename(public)
        assert attacked.fleet("pull-messages", request)[0] == 200


@pytest.fixture
def nginx(attacked, tmp_path):
    """nginx in front of the server, with the settings of docs/nginx.conf; its address."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    text = (Path(__file__).parents[2] / "docs" / "nginx.conf").read_text()
    for documented, here in (
        ("listen 8000", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8001", attacked.there.address),
        ("/srv/my-federation", str(attacked.there.folder)),
    ):
        assert documented in text
        text = text.replace(documented, here)
    temporary = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text(
        f"{user} daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {temporary}\n{text}\n}}\n"
    )
    process = subprocess.Popen([program, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
    try:
        wait_for_server(f"127.0.0.1:{port}", time.monotonic() + 20)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def test_nginx_in_front_lets_the_same_through(attacked, nginx):
    for path in CONTROL + RUNTIME + OTHERS + TRICKS:
        assert attacked.ask(path, address=nginx)[0] == 404, path
    for route in gateway.FLEET:
        assert attacked.ask(route, address=nginx)[0] == 401
        assert attacked.ask(route, address=nginx, method="GET")[0] == 403
    key = attacked.key()
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=30)
    for _ in range(3):  # over one connection to the server
        status = attacked.ask(
            "/v1/fleet/activate-node", attacked.signed(key), request.SerializeToString(), address=nginx
        )[0]
        assert status in (200, 412)


EVIL = """
import time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

open("PLACE/loaded-by-" + __import__("os").environ.get("FLWR_HOME", "").rpartition("/")[2], "w").close()
client = ClientApp()
server = ServerApp()

@client.query()
def steal(message, context):
    open("PLACE/client", "w").write(str(context.node_config))
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    names = list(grid.push_messages([Message(RecordDict(), node, "query") for node in grid.get_node_ids()]))
    replies, ends = [], time.time() + 60
    while not replies and time.time() < ends:
        replies = list(grid.pull_messages(names))
        time.sleep(0.1)
    said = [str(reply.content) if reply.has_content() else str(reply.error) for reply in replies]
    open("PLACE/words", "w").write(open("/proc/self/cmdline").read())
    open("PLACE/server", "w").write(chr(10).join(said))
"""


def test_an_app_that_the_server_sends_does_not_run_on_a_client(attacked, tmp_path):
    """Even the operator's: a client runs the app that its owner has installed."""
    app = tmp_path / "app"
    (app / "evil").mkdir(parents=True)
    (app / "evil" / "__init__.py").write_text("")
    (app / "evil" / "apps.py").write_text(EVIL.replace("PLACE", str(tmp_path)))
    (app / "pyproject.toml").write_text(
        '[project]\nname = "evil"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "x"\n[tool.flwr.app.components]\n'
        'serverapp = "evil.apps:server"\nclientapp = "evil.apps:client"\n[tool.flwr.app.config]\n'
    )
    command = run_command(app)
    done = subprocess.run(
        command, env=environment(attacked.there.home), capture_output=True, text=True, timeout=120, check=False
    )
    assert (tmp_path / "server").exists(), done.stdout + done.stderr
    assert "could not read the request" in (tmp_path / "server").read_text()
    assert not (tmp_path / "client").exists()
    words = (tmp_path / "words").read_text().split("\0")
    assert "pefll.deploy.server_app_process" in words
    assert not any("token" in word for word in words)  # the run's token came through a pipe
    assert [path.name for path in tmp_path.glob("loaded-by-*")] == [f"loaded-by-{attacked.there.home.name}"]
