"""A server that is attacked, and what the attacks are made with."""

from __future__ import annotations

import base64
import http.client
import os
import socket
import ssl
import time
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

RUNNING, ASLEEP = "client-000", "client-001"  # the second is registered, and the attacks are made with its key


class Attacked:
    """A server and a client; see the fixture."""

    def __init__(self, there):
        self.there = there
        self.authority = there.folder / "server" / "ca.crt"
        self.trust = ssl.create_default_context(cafile=str(self.authority))

    @property
    def own_address(self):
        """Of the operator's port, as whoever may read the home finds it, or anybody who tries all ports."""
        return tomllib.loads((self.there.home / "config.toml").read_text())["superlink"]["deployment"]["address"]

    @property
    def token(self):
        stored = yaml.safe_load((self.there.home / "credentials.yaml").read_text())
        (found,) = (value for key, value in stored.items() if key.endswith("access-token"))
        return base64.b64decode(found).decode()

    def ask(self, path, headers=None, content=b"", method="POST", address=None):
        """Send one request by hand, with the path as it is; return the status and what came back."""
        host, _, port = (address or self.there.address).rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), context=self.trust, timeout=20)
        try:
            connection.request(method, path, content, {"content-type": "application/protobuf", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def pour(self, head, part, most):
        """Send a request that goes on and on; return how many bytes the server took, and what it answered."""
        host, _, port = self.there.address.rpartition(":")
        taken, answer = 0, b""
        with (
            suppress(OSError),
            socket.create_connection((host, int(port)), timeout=20) as plain,
            self.trust.wrap_socket(plain, server_hostname=host) as line,
        ):
            line.sendall(head)
            with suppress(OSError):
                while taken < most:
                    line.sendall(part)
                    taken += len(part)
            answer = line.recv(100)
        return taken, answer

    def memory(self, which):
        """Return the bytes of memory of the process that listens: VmRSS for now, VmHWM for the most so far."""
        (pid,) = (pid for pid in family(self.there.running["server"].pid) if listens_at(pid))
        (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(which))
        return int(line.split()[1]) << 10

    def signed(self, key, when=None):
        """Return the headers that a node with a key sends."""
        stamp = (when or datetime.now(UTC)).isoformat()
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public_key_to_bytes(key.public_key())).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, stamp.encode())).decode(),
            TIMESTAMP_HEADER: stamp,
        }

    def key(self, name=ASLEEP):
        return load_ssh_private_key((self.there.folder / "clients" / name / "node.key").read_bytes(), None)

    def fleet(self, route, message, key=None):
        key = key or self.key()
        return self.ask(f"/v1/fleet/{route}", self.signed(key), message.SerializeToString())


def reply_of(node, **words):
    """Return what a node sends as its reply."""
    told = {"src_node_id": node.node_id, "reply_to_message_id": "message", "created_at": time.time(), "ttl": 60.0}
    return PushMessagesRequest(
        node=node,
        messages_list=[Message(metadata=Metadata(**(told | words)))],
        message_object_trees=[ObjectTree()],
        clientapp_runtime_list=[1.0],
    )


def requests_for(node, part, transfer="", message=""):
    """Return a node's requests, by route, that name a part of a message, a transfer and a message."""
    own = {"node": node, "run_id": 1}
    return {
        "pull-object": PullObjectRequest(**own, object_id=part),
        "push-object": PushObjectRequest(**own, object_id=part, session_id=transfer, object_content=b"x"),
        "confirm-message-received": ConfirmMessageReceivedRequest(**own, message_object_id=message),
    }


def wait_for(what, there, seconds=90):
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, there.log("server")[-2000:] + there.log(RUNNING)[-2000:]
        time.sleep(0.1)


def family(pid):
    """Return a process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def listens_at(pid):
    """Return the places at which a process listens."""
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(link))
        except OSError:
            continue
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in held]
