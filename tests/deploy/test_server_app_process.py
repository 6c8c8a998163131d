"""The server's process that starts runs: what it started ends with it."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.deploy.server_app_process import AppStarter, runtime_handlers


def test_an_app_that_is_started_while_the_server_ends_is_ended_too(monkeypatch):
    asked, ended = threading.Event(), threading.Event()

    acquire_task = runtime_handlers.acquire_task

    def acquire(request, state):
        if state is not None:  # a server that another test left running
            return acquire_task(request, state)
        asked.set()
        time.sleep(0.2)  # meanwhile the server ends
        return SimpleNamespace(token="secret")

    popen = subprocess.Popen

    def start(command, stdin):
        app = popen(["sleep", "30"], stdin=stdin)  # which does not end by itself
        monkeypatch.setattr(app, "terminate", lambda: (popen.terminate(app), ended.set()))
        return app

    monkeypatch.setattr(runtime_handlers, "acquire_task", acquire)
    monkeypatch.setattr(subprocess, "Popen", start)
    starter = AppStarter(None, "127.0.0.1:1", Path("ca.crt"), print)
    starter.start()
    assert asked.wait(5)
    starter.close()
    assert ended.wait(60)  # on a busy machine `close` may have returned before the app was there
    starter.join(60)
    assert not starter.is_alive()


def test_a_server_that_never_began_can_be_closed():
    AppStarter(None, "127.0.0.1:1", Path("ca.crt"), print).close()
