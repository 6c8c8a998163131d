"""A Flower ClientApp that starts fast: it hands each message to a process that has everything loaded already.

Flower starts a process for every message, and loading torch takes longer than most answers. So `pefll flower client`
starts, beside Flower's SuperNode, one process that stays (`pefll.deploy.resident`), and this module only carries
messages to it. It is no part of the package `pefll`, whose import would load torch. Where nobody is at the socket, the
message is answered right here, more slowly and with the same result.
"""

from __future__ import annotations

import socket
import struct

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage

_LENGTH = struct.Struct("<Q")


def send_part(connection: socket.socket, part: bytes) -> None:
    """Send bytes with their length before them."""
    connection.sendall(_LENGTH.pack(len(part)))
    connection.sendall(part)


def receive_part(connection: socket.socket) -> bytes:
    """Return what `send_part` has sent at the other end."""
    size = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class NodeApp(ClientApp):  # type: ignore[misc]
    """Carries messages to the process that stays."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        place = str(context.node_config.get("resident", ""))
        if place:
            try:
                return self._hand_over(place, message, context)
            except OSError:
                pass
        from pefll.deploy.apps import client

        return client(message, context)

    def _hand_over(self, place: str, message: Message, context: Context) -> Message:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(place)
            send_part(connection, message_to_proto(message).SerializeToString())
            send_part(connection, message.metadata.message_id.encode())
            send_part(connection, context_to_proto(context).SerializeToString())
            reply = message_from_proto(ProtoMessage.FromString(receive_part(connection)))
            context.state = context_from_proto(ProtoContext.FromString(receive_part(connection))).state
        return reply


client = NodeApp()
