"""A Flower grid without a network: it calls the ClientApp in this process, one message after another.

It is for tests and for counting bytes. Records, ClientApp and exchanges are the same as with real clients. A test can
give its own `transport`, which loses or changes messages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from pefll.core.errors import PefllError
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS

try:
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:
    raise PefllError("real clients need Flower: pip install flwr==1.41.0", code="PEFLL-F401") from None

RUN_ID, SERVER_ID, TASK_ID = 1, 1, 1
# Called with a node, a request, and a function that returns the node's reply. Returns none, one or several replies.
Transport = Callable[[int, Message, Callable[[Message], Message]], list[Message]]


class InProcessGrid(Grid):  # type: ignore[misc]
    """A grid whose nodes are in this process.

    Args:
        app: the ClientApp of every node.
        nodes: the config of each node, by node id.
        run_config: Flower's config of the run.
        transport: brings requests to nodes; the default one loses no message.

    Attributes:
        contexts: Flower's context of each node.
        online: the connected nodes.
        keys: the name under which a node's key is registered, by node id.
        transport: see above; a test may replace it at any time.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        run_config: Mapping[str, Any],
        transport: Transport | None = None,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER_ID, TASK_ID
        self._app = app
        self.contexts = {
            node: Context(RUN_ID, node, dict(config), RecordDict(), dict(run_config)) for node, config in nodes.items()
        }
        self.online = set(nodes)
        self.keys: dict[int, str] = {}
        self.transport: Transport = transport or (lambda node, request, deliver: [deliver(request)])
        self._replies: dict[str, list[Message]] = {}

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Not supported."""
        raise NotImplementedError

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        """Return a message."""
        return Message(*arguments, **more)

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""
        return sorted(self.online)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the connected nodes, with the names of their keys."""
        return [NodeInfo(node_id=node, name=self.keys.get(node, "")) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Bring messages to their nodes, which reply at once."""
        names = []
        for message in messages:
            name = str(uuid4())
            message.metadata.__dict__["_message_id"] = name
            names.append(name)
            node = message.metadata.dst_node_id
            if node not in self.online:
                self._replies[name] = [Message(Error(5, "the node is gone"), reply_to=message)]
                continue
            request = copy.deepcopy(message)  # a node must not share memory with the server
            self._replies[name] = self.transport(node, request, self._deliver)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, and forget the replies."""
        return [reply for name in list(message_ids) for reply in self._replies.pop(name, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages, and pull the replies."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, request: Message) -> Message:
        return copy.deepcopy(self._app(request, self.contexts[request.metadata.dst_node_id]))


def write_client(federation: Federation, client: int, path: Path) -> None:
    """Write one client's samples and their splits to an .npz file, in the federation's order."""
    rows = [federation.indices(client, split) for split in range(len(SPLITS))]
    split = np.repeat(np.arange(len(SPLITS)), [len(part) for part in rows])
    chosen = torch.cat(rows)
    np.savez(path, x=federation.x[chosen].numpy(), y=federation.y[chosen].numpy(), split=split)
