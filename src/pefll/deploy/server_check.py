"""Checks before a client's process starts: the server's certificate, and whether the server knows the client's key."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from pefll.core.errors import PefllError

_UNKNOWN_KEY = 401  # the gateway's status for an unknown key


def check_server(address: str, authority: Path) -> None:
    """Raise PefllError if no server listens at host:port, or if `authority` did not sign its certificate.

    Without this check, Flower retries and does not say why.
    """
    host, _, port = address.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=str(authority))
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            trust.wrap_socket(plain, server_hostname=host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        raise PefllError(
            f"the server at {address} is not this federation's: {error.verify_message}", code="PEFLL-F418"
        ) from None
    except ssl.SSLError as error:
        raise PefllError(f"the server at {address} does not speak TLS: {error.reason}", code="PEFLL-F419") from None
    except OSError as error:
        raise PefllError(f"there is no server at {address}: {error.strerror or error}", code="PEFLL-F420") from None


def check_key_known(address: str, authority: Path, private_key: Path, name: str) -> None:
    """Raise PefllError if the server does not know a client's key.

    It sends a request to activate the client with an invalid time between heartbeats, 0 s. The gateway forwards it only
    if the key is known. Then Flower refuses it, so the request changes nothing. All other errors are ignored here,
    because the client's process logs them.

    Args:
        address: address of the server, host:port.
        authority: path of the federation's ca.crt.
        private_key: path of the client's node.key.
        name: name of the client.
    """
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    try:
        key = load_ssh_private_key(private_key.read_bytes(), None)
        public = key.public_key()
        signing = NodeAuthHttpInterceptor(key, public)
    except (OSError, ValueError, AttributeError):
        raise PefllError(
            f"{private_key} is not a client's key; ask the operator for the client's folder again", code="PEFLL-F106"
        ) from None
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0.0)
    try:
        with FleetHttpClient.from_server_address(
            address, False, authority.read_bytes(), interceptors=[signing]
        ) as server:
            server.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == _UNKNOWN_KEY:
            raise PefllError(
                f"the server at {address} does not know the key of {name}: ask its operator to run `pefll flower add "
                f"FEDERATION {name}` and to send the new folder; or the clock of this machine is wrong",
                code="PEFLL-F103",
            ) from None
    except (httpx.HTTPError, OSError):  # the server has just gone; the client's process waits for it
        return
