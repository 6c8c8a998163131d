"""`pefll flower demo`: what it says and makes, and that nobody outlives it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from rich.console import Console

from pefll.core.errors import PefllError
from pefll.deploy import demo, server_app
from pefll.deploy.apps import write_model
from pefll.deploy.loopback import Loopback
from pefll.deploy.plan import read_app
from pefll.deploy.processes import environment
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.inprocess import InProcessGrid
from pefll.engines.flower.protocol.names import DELIVER
from pefll.runs.record import RunFolder
from tests.deploy.process_search import WORD, alive_with, wait_until


class InProcess(Loopback):
    """The same federation and the same messages, with nodes in this process instead of Flower's processes."""

    def start_server(self, seconds=60.0):
        self.nodes = {}

    def start_client(self, name, data, model=None, through="", **more):
        number = 1000 + len(self.nodes)
        self.nodes[number] = {"name": name, "data": str(data.resolve()), "model": str(model.resolve())}
        (self.logs / f"{name}.log").write_text("SuperNode ID: 1\n")

    def end(self, *names, hard=False):
        self.nodes = {number: node for number, node in self.nodes.items() if node["name"] not in names}

    def run(self, seconds, name="run", watched=(), look=lambda: None, **overrides):
        plan = read_app(self.folder)
        grid = InProcessGrid(PefllClientApp({DELIVER: write_model}), self.nodes, plan.agreement.to_config())
        (server_app.personalize if overrides.get("task") == "personalize" else server_app.train)(grid, plan)
        look()
        return ""


def test_the_new_client_ends_with_a_model_that_works(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "Loopback", InProcess)
    said = io.StringIO()
    demo.demo(tmp_path / "d", 4, 1, Console(file=said, width=1000))
    text = said.getvalue()
    assert "bit for bit that of a simulation of all rounds" in text
    own, one_for_all, often = (int(word) for word in re.findall(r"(\d+)%", text.partition("me.safetensors")[2]))
    assert own > 70 > often  # 82, 69 and 27 here; another processor may round otherwise
    assert 0 < one_for_all < 100
    summary = RunFolder(tmp_path / "d" / "federation" / "run").summary()
    assert [part["engine"] for part in summary["engines"]] == ["serial", "flower"]
    assert summary["best_round"] == summary["rounds"] == demo.SIMULATED + 1  # what real clients made is what is used
    # Another demo may take its place, but nothing else is removed.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(PefllError) as refused:
        demo.demo(tmp_path / "mine", 3, 1, Console(file=said))
    assert refused.value.code == "PEFLL-F122"


@pytest.mark.slow  # test_watchdog.py and test_processes.py are the faster ones
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_ended_leaves_nobody_behind(number, tmp_path):
    """With real processes: a server, two clients, and all that Flower starts for them."""
    mine = {WORD: str(tmp_path)}
    words = ["--out", str(tmp_path / "d"), "--clients", "2", "--simulated", "2"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pefll", "flower", "demo", *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment() | mine,
            start_new_session=True,
        )

    def everybody_is_there():
        assert process.poll() is None, (tmp_path / "said").read_text()
        commands = " ".join(alive_with(mine).values())
        return commands.count("pefll.deploy.node") == 2 and "pefll.deploy.server_app_process" in commands

    try:
        wait_until(everybody_is_there, 180)
        assert len(alive_with(mine)) >= 7  # also itself, its watchdog, the server and the command that waits for it
        process.send_signal(number)
        assert process.wait(20) == (128 + number if number == signal.SIGTERM else -number)
        wait_until(lambda: not alive_with(mine), 15)
        assert ("everything that was started is ended" in (tmp_path / "said").read_text()) == (number == signal.SIGTERM)
    finally:
        for pid in alive_with(mine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
