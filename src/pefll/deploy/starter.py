"""Starts the server's app when the operator has asked for a run.

In Flower's own way of doing this another process asks for work over the network, and the token of the run is in the
argument list of the app, where everybody on the machine can read it. Here the server itself looks, and the app gets its
token through a pipe.
"""

from __future__ import annotations

import hmac
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError

try:
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.servicer.runtime import runtime_handlers
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None

_LOOK_SECONDS = 0.5
_CLOSE_SECONDS = 10.0


class Starter(threading.Thread):
    """Looks for runs that nobody does yet, and starts a process for each.

    Args:
        state: Flower's database.
        address: of the port for operators and apps, host:port.
        authority: ca.crt.
        report: is told what went wrong.
    """

    def __init__(self, state: Any, address: str, authority: Path, report: Callable[[str], None]) -> None:
        super().__init__(name="starter", daemon=True)
        self._state, self._address, self._authority, self._report = state, address, authority, report
        self._over = threading.Event()
        self._apps: dict[str, subprocess.Popen[bytes]] = {}  # by the tokens of their runs

    def run(self) -> None:
        """Start what is asked for, until the server ends."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        while not self._over.wait(_LOOK_SECONDS):
            self._apps = {token: app for token, app in self._apps.items() if app.poll() is None}
            try:
                task = runtime_handlers.acquire_task(request, self._state)
                if task.token:
                    self._start(task.token)
            except Exception as error:  # noqa: BLE001 - the next run must be started all the same
                self._report(f"a run could not be started: {error}")

    def is_running(self, token: bytes) -> bool:
        """Return whether a token is that of a run that was started here and is not over."""
        return any(hmac.compare_digest(token, known.encode()) for known in list(self._apps))

    def close(self) -> None:
        """Start nothing more, and end what was started."""
        self._over.set()
        if self.is_alive():  # it may be about to start one more
            self.join(_CLOSE_SECONDS)
        for app in list(self._apps.values()):
            app.terminate()

    def _start(self, token: str) -> None:
        command = [
            *(sys.executable, "-P", "-m", "pefll.deploy.server_process"),
            *("--runtime-api-address", self._address),
            *("--root-certificates", str(self._authority)),
            *("--parent-pid", str(os.getpid())),
        ]
        app = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._apps[token] = app
        assert app.stdin is not None
        with app.stdin as pipe:
            pipe.write(f"{token}\n".encode())
        if self._over.is_set():  # `close` may have looked before this one was there
            app.terminate()
