"""A client's process: Flower's SuperNode, and a thread that answers the server's messages with the client's app.

Flower's program `flower-supernode` opens a port on the client's machine. For each message it starts a process that has
a token in its argument list. And it runs any app that the server sends. This process does none of that. Flower's loop
transfers messages, and a thread answers them with the app that the client's owner installed. The process opens no port
and runs no code from the server. Its argument list names one file that only its owner can read.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from logging import ERROR
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Error, Message
from flwr.common.constant import ISOLATION_MODE_PROCESS, ErrorCode, Status, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.servicer.runtime import runtime_handlers as core_handlers
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
from flwr.supernode.servicer.runtime import runtime_handlers
from flwr.supernode.start_client_internal import start_client_internal

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.core.plugins import allow_only
from pefll.deploy.plan import CLIENT_APP
from pefll.deploy.private import PRIVATE_UMASK, write_private
from pefll.engines.settings import keep_freed_memory

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a client's process.

    Attributes:
        address: address of the server, host:port.
        authority: path of ca.crt.
        key: path of the client's private key.
        config: Flower's node config for the client's app, such as the client's name and the path of its data.
        app: the app that answers messages, module:name; only the client's owner chooses it.
        code: methods and models, in addition to pefll's own, that the server may name: package.module:Name.
    """

    address: str
    authority: str
    key: str
    config: dict[str, str | bool]
    app: str = CLIENT_APP
    code: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the settings to a file that only its owner can read, because they name the client's data."""
        write_private(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> NodeSettings:
        """Read the settings from a file."""
        try:
            return cls(**parse_json(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise PefllError(f"{path} is not a file of a client's settings: {error}", code="PEFLL-F002") from None


class LocalRuntime:
    """Flower's Runtime API for one task of a node, as function calls instead of requests."""

    def __init__(self, state: NodeState, task: Any) -> None:
        self._state, self._task = state, task

    def __getattr__(self, name: str) -> Any:
        """Return Flower's function for an API call: `PullObject` is Flower's function `pull_object`."""
        words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]
        handler = getattr(core_handlers if name == "SendTaskHeartbeat" else runtime_handlers, words)
        return lambda request: handler(request, self._state, self._task)

    def PullObject(self, request: Any) -> Any:
        """Return an object of the message if the object has arrived; ConnectionError if it never will.

        Flower's loop fetches one message at a time. If another task is pending, the loop has given up this message:
        for example, the server was killed while it sent the message.
        """
        found = runtime_handlers.pull_object(request, self._state, self._task)
        if not found.object_available and self._state.get_tasks(statuses=[Status.PENDING]):
            raise ConnectionError("the message was not sent to its end")
        return found


class Answering(threading.Thread):
    """A thread that answers the messages of Flower's loop, one after another, with one app."""

    def __init__(self, state: NodeState, app: Any) -> None:
        super().__init__(name="answering", daemon=True)
        self._state, self._app = state, app

    def run(self) -> None:
        """Answer messages until the process ends."""
        # The server may ask for either type of app; this app answers both.
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP, TaskType.AGENT_APP])
        while True:
            try:
                found = runtime_handlers.acquire_task(request, self._state)
                if found.token:
                    self._answer(LocalRuntime(self._state, found.task))
                    continue
            except Exception as error:  # noqa: BLE001 - the thread must go on to answer the next message
                log(ERROR, "a message could not be answered: %s", error)
            except BaseException as error:  # noqa: BLE001 - without this thread the client would never answer again
                log(ERROR, "the client ends: %s", type(error).__name__, exc_info=error)
                os._exit(1)  # `pefll flower client` starts it again
            time.sleep(_LOOK_SECONDS)

    def _answer(self, runtime: LocalRuntime) -> None:
        # Flower's own heartbeat would end the process when the task is over, and so the client.
        alive = HeartbeatSender(lambda: runtime.SendTaskHeartbeat(SendTaskHeartbeatRequest()) is not None)
        alive.start()
        context, outcome = None, SubStatus.FAILED
        try:
            message, context, _, _ = pull_task_input(runtime)
            reply, outcome = self._reply(message, context)
            push_message(runtime, reply, context)
        finally:
            push_task_output(runtime, context, outcome, "")
            if alive.is_running:
                alive.stop()

    def _reply(self, message: Message, context: Context) -> tuple[Message, str]:
        """Return the app's reply and status. The server gets only the type of an error: its text may contain data."""
        try:
            return self._app(message, context), SubStatus.COMPLETED
        except Exception as error:  # noqa: BLE001
            log(ERROR, "the app failed", exc_info=error)
            failed = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=type(error).__name__)
            return Message(failed, reply_to=message), SubStatus.FAILED


def take_part(settings: NodeSettings) -> None:
    """Take part as a client until the process ends."""
    module, _, name = settings.app.partition(":")
    app = getattr(import_module(module), name)
    allow_only(*settings.code)
    keep_freed_memory(True)  # the next training step reuses freed memory
    key = load_ssh_private_key(Path(settings.key).read_bytes(), None)
    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    Answering(factory.state(), app).start()
    start_client_internal(
        state_factory=factory,
        server_address=settings.address,
        node_config=dict(settings.config),
        root_certificates=Path(settings.authority).read_bytes(),
        insecure=False,
        authentication_keys=(key, key.public_key()),
        isolation=ISOLATION_MODE_PROCESS,
        runtime_dependency_install=False,
    )


def main() -> None:
    """Read the settings file that the command line names, and take part."""
    os.umask(PRIVATE_UMASK)
    try:
        take_part(NodeSettings.read(Path(sys.argv[1])))
    except PefllError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
