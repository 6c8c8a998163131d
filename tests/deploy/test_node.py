"""A client's process: it answers with its owner's app, and runs no code that the server names."""

from __future__ import annotations

import hashlib
import stat
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import _insert_message

from pefll.core.errors import PefllError
from pefll.core.plugins import CODE
from pefll.deploy.node import Answering, NodeSettings, runtime_handlers
from pefll.deploy.plan import CLIENT_APP, read_app, renew_app
from pefll.deploy.processes import client_command


def test_settings_are_in_a_file_of_ones_own_and_not_in_the_argument_list(tmp_path):
    data = tmp_path / 'it\'s "mine".npz'
    command = client_command(tmp_path, "127.0.0.1:1", {"name": "ann", "data": str(data)}, code=["mine:Own"])
    assert command[-1] == str(tmp_path / "node.json")
    assert "npz" not in " ".join(command)
    assert stat.S_IMODE((tmp_path / "node.json").stat().st_mode) == 0o600
    read = NodeSettings.read(tmp_path / "node.json")
    assert (read.config["data"], read.app, list(read.code)) == (str(data), CLIENT_APP, ["mine:Own"])
    for damaged in ("[]", "[" * 100_000):
        (tmp_path / "node.json").write_text(damaged)
        with pytest.raises(PefllError) as caught:
            NodeSettings.read(tmp_path / "node.json")
        assert caught.value.code == "PEFLL-F002"


def test_a_client_imports_no_code_that_only_the_server_names(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nModel = Method = None\n")
    program = (
        "import os\n"
        "from pefll.core.plugins import CODE, allow_only, import_name\n"
        "from pefll.core.errors import PefllError\n"
        "os.environ[CODE] = 'subprocess:Popen'  # as inherited, and not named to the client\n"
        "allow_only('json:dumps')\n"
        "import_name('json:dumps', 'method')\n"
        "for name in ('evil:Method', 'subprocess:Popen'):\n"
        "    try:\n"
        "        import_name(name, 'method')\n"
        "    except PefllError as error:\n"
        "        assert error.code == 'PEFLL-M001', error\n"
        "    else:\n"
        "        raise SystemExit(f'{name} was imported')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert not (tmp_path / "ran").exists()


def test_an_owner_names_code_as_an_option_or_in_the_environment(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from pefll.cli.flower import app

    named = []
    monkeypatch.setattr("pefll.deploy.foreground.take_part", lambda *arguments: named.append(arguments[-2]))
    words = ["client", str(tmp_path), "--data", "x.npz"]
    monkeypatch.setenv(CODE, "mine:Own,mine:build")
    for more in ([], ["--code", "a:B"], ["--code", "a:B,c:D", "--code", "e:F"]):
        CliRunner().invoke(app, words + more, catch_exceptions=False)
    monkeypatch.delenv(CODE)
    CliRunner().invoke(app, words, catch_exceptions=False)
    assert named == [["mine:Own", "mine:build"], ["a:B"], ["a:B", "c:D", "e:F"], []]


def test_an_older_federation_names_the_clients_app_where_it_is_now(tmp_path):
    from pefll.deploy.plan import Plan, write_app
    from tests.engines.flower.federations import setting

    write_app(tmp_path, "fed", Plan(setting(tmp_path, clients=1).agreement, ("ann",)), client="pefll_node:client")
    renew_app(tmp_path)
    assert f'clientapp = "{CLIENT_APP}"' in (tmp_path / "pyproject.toml").read_text()
    assert read_app(tmp_path).names == ("ann",)


def answers(app, kinds, lost=0):
    """Return the replies of a node whose messages belong to an app that somebody else has sent.

    Args:
        app: its owner's.
        kinds: of the tasks.
        lost: how many further messages come before these, whose content never does.
    """
    state = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    state.set_node_id(7)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    fab = Fab(hashlib.sha256(b"evil").hexdigest(), b"evil", {})
    state.store_fab(fab)
    state.store_run(Run.create_empty(1))
    run = state.get_run(1)
    run.fab_hash = fab.hash_str
    state.set_run_series_context(run.series_id, Context(1, 7, {"name": "ann"}, RecordDict(), {}))
    Answering(state, app).start()
    replies = []
    for number, kind in enumerate([TaskType.CLIENT_APP] * lost + kinds):
        message = Message(RecordDict(), dst_node_id=7, message_type="query", group_id=str(number))
        message.metadata.__dict__["_run_id"] = 1
        assert state.create_task(task_type=kind, run_id=1, fab_hash=fab.hash_str)
        if number < lost:
            message.metadata.__dict__["_message_id"] = message.object_id
            state.object_store.preregister(1, get_object_tree(message))
            state.store_message(message)
            time.sleep(0.5)
            continue
        _insert_message(message, state, state.object_store)
        ends = time.monotonic() + 60
        while not (found := state.get_messages_legacy(is_reply=True)):
            assert time.monotonic() < ends
            time.sleep(0.05)
        replies += found
    return replies


def test_a_node_answers_with_its_owners_app_and_goes_on_after_an_error():
    asked = []

    def app(message, context):
        asked.append((message.metadata.message_type, context.node_config["name"]))
        if len(asked) == 1:
            raise ValueError("a secret of the data")
        return Message(RecordDict(), reply_to=message)

    kinds = [TaskType.CLIENT_APP, TaskType.CLIENT_APP, TaskType.AGENT_APP]
    failed, *others = answers(app, kinds)
    assert asked == [("query", "ann")] * 3
    assert (failed.error.code, failed.error.reason) == (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "ValueError")
    assert all(not reply.has_error() for reply in others)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_client_that_cannot_answer_any_more_ends(kind, monkeypatch):
    """So that it is started again; a thread that ends by itself would leave a client that never answers."""

    class Ended(BaseException):
        pass

    def end(status):
        raise Ended(status)

    real = runtime_handlers.acquire_task

    def acquire(request, state):
        if state is None:  # and not for the threads of other tests, which go on
            raise kind
        return real(request, state)

    monkeypatch.setattr("pefll.deploy.node.os._exit", end)
    monkeypatch.setattr(runtime_handlers, "acquire_task", acquire)
    with pytest.raises(Ended, match="1"):
        Answering(None, None).run()


def test_a_message_that_is_never_whole_does_not_keep_the_next_ones_waiting():
    """As when the server is killed while it sends one."""
    (reply,) = answers(lambda message, context: Message(RecordDict(), reply_to=message), [TaskType.CLIENT_APP], lost=1)
    assert not reply.has_error()
    assert reply.metadata.group_id == "1"
