"""Starts a process of the server's app for each run that the operator starts; `main` runs in this process.

In Flower, a further process asks for runs over the network, and puts the token of the run into the app's argument list.
Everybody on the machine can read argument lists. Here the server polls its own database, and the app gets its token
through a pipe.
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

from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.servicer.runtime import runtime_handlers
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp

_POLL_SECONDS = 0.5
_CLOSE_SECONDS = 10.0


class AppStarter(threading.Thread):
    """Polls Flower's database, `state`, for new runs, and starts a process for each.

    Each process gets `address` (host:port for operators and apps) and `authority` (the path of ca.crt).
    """

    def __init__(self, state: Any, address: str, authority: Path, report: Callable[[str], None]) -> None:
        super().__init__(name="app-starter", daemon=True)
        self._state, self._address, self._authority, self._report = state, address, authority, report
        self._closing = threading.Event()
        self._apps: dict[str, subprocess.Popen[bytes]] = {}  # keys are the tokens of the runs

    def run(self) -> None:
        """Start a process for each new run until the server ends."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        while not self._closing.wait(_POLL_SECONDS):
            self._apps = {token: app for token, app in self._apps.items() if app.poll() is None}
            try:
                task = runtime_handlers.acquire_task(request, self._state)
                if task.token:
                    self._start(task.token)
            except Exception as error:  # noqa: BLE001 - the thread must go on to start the next run
                self._report(f"a run could not be started: {error}")

    def is_running(self, token: bytes) -> bool:
        """Return whether a token belongs to a run that was started here and has not ended."""
        return any(hmac.compare_digest(token, known.encode()) for known in list(self._apps))

    def close(self) -> None:
        """Start no more processes, and end the running ones."""
        self._closing.set()
        if self.is_alive():  # the thread may be about to start another process
            self.join(_CLOSE_SECONDS)
        for app in list(self._apps.values()):
            app.terminate()

    def _start(self, token: str) -> None:
        command = [
            *(sys.executable, "-P", "-m", "pefll.deploy.server_app_process"),
            *("--runtime-api-address", self._address),
            *("--root-certificates", str(self._authority)),
            *("--parent-pid", str(os.getpid())),
        ]
        app = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._apps[token] = app
        assert app.stdin is not None
        with app.stdin as pipe:
            pipe.write(f"{token}\n".encode())
        if self._closing.is_set():  # `close` may have run before this app was in the list
            app.terminate()


def main() -> None:
    """Read the run's token from the pipe, and run the server's app."""
    token = sys.stdin.readline().strip()
    sys.stdin.close()
    # This changes only Python's list. The system's argument list, which other users can read, never has the token.
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", token]
    flwr_serverapp()


if __name__ == "__main__":
    main()
