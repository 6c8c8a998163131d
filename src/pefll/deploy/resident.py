"""The process of a client that stays: it has torch loaded, and answers what `pefll_node` hands over.

Between two messages it keeps the modules it has imported and, as long as they are those on the disk, the client's
samples: nothing that an answer depends on.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from pefll.deploy.apps import client
from pefll.engines.settings import EngineSettings
from pefll.errors import PefllError
from pefll_node import receive_part, send_part

try:
    from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Context as ProtoContext
    from flwr.proto.message_pb2 import Message as ProtoMessage
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'") from None


class _Staying:
    """Stands for an engine that is open as long as the process lives."""


def serve(place: Path) -> None:
    """Answer messages that come through a socket, one after another, until the process is ended."""
    staying = _Staying()
    EngineSettings.take(staying)  # for good: what a training step frees is kept for the next one
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o177)  # the socket is its owner's alone
        try:
            listener.bind(str(place))
        finally:
            os.umask(before)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    answer_one(connection)
                except OSError:  # whoever asked is gone
                    continue


def answer_one(connection: socket.socket) -> None:
    """Answer one message."""
    message = message_from_proto(ProtoMessage.FromString(receive_part(connection)))
    # Flower does not write a message's own id into it, and a reply has to name it.
    message.metadata.__dict__["_message_id"] = receive_part(connection).decode()
    context = context_from_proto(ProtoContext.FromString(receive_part(connection)))
    reply = client(message, context)
    send_part(connection, message_to_proto(reply).SerializeToString())
    send_part(connection, context_to_proto(context).SerializeToString())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
