"""A process of Flower's that ends by itself or cannot start: one sentence that says why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.core.errors import PefllError
from pefll.deploy.connections import check_port
from pefll.deploy.folder import add_client, find_bundle, server_address
from pefll.deploy.loopback import Loopback
from pefll.deploy.process_output import ShownProcess, error_line, exit_error
from pefll.deploy.processes import environment, free_port, server_command
from pefll.deploy.server_check import check_key_known
from tests.deploy.test_verbs import pefll
from tests.engines.flower.deployment import deploy
from tests.engines.flower.federations import setting

IN_USE = """\
2026-01-01T00:00:00.000Z INFO [uvicorn.error] Application startup complete.
2026-01-01T00:00:00.000Z ERROR [uvicorn.error] [Errno 98] error while attempting to bind: address already in use
2026-01-01T00:00:00.000Z INFO [uvicorn.error] Application shutdown complete.
\x1b[92mINFO \x1b[0m:      SuperLinkLifespan: stop
"""
REFUSED = """\
\x1b[92mINFO \x1b[0m:      Starting Flower SuperNode
\x1b[91mERROR \x1b[0m:     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 2004] The SuperNode could not be activated.

For more information, visit: <https://flower.ai/docs>
\x1b[92mINFO \x1b[0m:      bye
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
sqlite3.OperationalError: disk I/O error
"""


@pytest.fixture
def port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def test_the_line_that_says_what_went_wrong_is_found():
    assert error_line(REFUSED) == (
        "Exit Code: 305 Failed to initialize the connection to the SuperLink. "
        "[code: 2004] The SuperNode could not be activated."
    )
    assert error_line(TRACEBACK) == "sqlite3.OperationalError: disk I/O error"
    assert error_line(IN_USE).endswith("address already in use")
    assert error_line("one\n\x1b[92mtwo\x1b[0m\n\n") == "two"
    assert error_line("") == "nothing"


def test_a_port_that_was_taken_after_the_check_is_said_as_one_before_it(tmp_path, port):
    """The server's process takes the port itself, and what it says of it is passed on."""
    words = server_command(tmp_path, "127.0.0.1", port, None)
    said = subprocess.run(words, env=environment(tmp_path / "home"), capture_output=True, text=True).stderr
    error = exit_error("the server", said, tmp_path / "log")
    assert error.code == "PEFLL-F101"
    with pytest.raises(PefllError) as checked:
        check_port("127.0.0.1", port, tmp_path)
    assert str(error) == str(checked.value)
    assert exit_error("the server", TRACEBACK, tmp_path / "log").code == "PEFLL-F102"


def test_a_port_is_checked_before_anything_is_started(port):
    with pytest.raises(PefllError, match=f"port {port} .*renew fed --address.*PEFLL-F101") as refused:
        check_port("127.0.0.1", port, Path("fed"))
    assert refused.value.code == "PEFLL-F101"
    with pytest.raises(PefllError, match="PEFLL-F104") as refused:
        check_port("192.0.2.1", port, Path("fed"))
    assert refused.value.code == "PEFLL-F104"
    check_port("127.0.0.1", free_port(), Path("fed"))


def test_a_process_that_ends_by_itself_is_quoted_with_its_log(tmp_path, capfd):
    code = "import sys; print('hello'); sys.stdout.flush(); raise ValueError('no disk')"
    process = ShownProcess([sys.executable, "-S", "-c", code], os.environ, tmp_path / "it.log")
    process.wait(20)
    with pytest.raises(PefllError, match=r"ValueError: no disk.*PEFLL-F102") as ended:
        process.check("it")
    assert ended.value.code == "PEFLL-F102"
    assert str(tmp_path / "it.log") in str(ended.value)
    assert (tmp_path / "it.log").read_text().startswith("hello\nTraceback")
    assert (tmp_path / "it.log").stat().st_mode & 0o777 == 0o600
    assert "hello" in capfd.readouterr().err


def test_a_server_whose_port_is_in_use_says_so_and_can_be_moved(tmp_path, port, capsys, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    folder = tmp_path / "fed"
    pefll(capsys, "flower", "init", str(folder), "--clients", "ann,bob", "--address", f"127.0.0.1:{port}")
    code, said = pefll(capsys, "flower", "server", str(folder))
    assert (code, said.count("error:")) == (2, 1)
    assert f"port {port}" in said
    assert "PEFLL-F101" in said
    assert f"pefll flower renew {folder} --address" in said
    code, said = pefll(capsys, "flower", "renew", str(folder), "--address", "127.0.0.1:9")
    assert code == 0, said
    assert server_address(folder) == find_bundle(folder, "bob").address == "127.0.0.1:9"
    code, said = pefll(capsys, "flower", "renew", str(folder), "--address", "nowhere")
    assert (code, server_address(folder)) == (2, "127.0.0.1:9")


def test_an_unregistered_client_is_told_so_and_a_registered_one_is_let_in(tmp_path, capsys):
    """One server, with real processes: a port that is in use, an unknown key, a known one, a damaged one."""
    here = setting(tmp_path, clients=1)
    there: Loopback = deploy(here, tmp_path / "p", clients_per_round=1)
    data = str(tmp_path / "client-000.npz")

    def asked(name):
        bundle = find_bundle(there.folder, name)
        return bundle.address, bundle.folder / "ca.crt", bundle.folder / "node.key", name

    with there:
        there.start_server()
        add_client(there.folder, "stranger")
        check_key_known(*asked("stranger"))  # says nothing: the server has looked into keys/
        (there.folder / "keys" / "stranger.pub").unlink()
        code, said = pefll(capsys, "flower", "client", str(there.folder), "--name", "stranger", "--data", data)
        assert (code, said.count("error:")) == (2, 1)
        assert "PEFLL-F103" in said
        assert "PEFLL-F103" in said
        check_key_known(*asked("client-000"))  # says nothing
        (there.folder / "clients" / "stranger" / "node.key").write_text("nonsense")
        code, said = pefll(capsys, "flower", "client", str(there.folder), "--name", "stranger", "--data", data)
        assert (code, "PEFLL-F106" in said) == (2, True)
        code, said = pefll(capsys, "flower", "server", str(there.folder))
        assert (code, "PEFLL-F101" in said) == (2, True)
