"""Whether the server knows a client's key, asked before the client's process is started."""

from __future__ import annotations

from pathlib import Path

from pefll.core.errors import PefllError

_UNKNOWN = 401  # what the server's gate says to a stranger


def check_key_known(address: str, authority: Path, private_key: Path, name: str) -> None:
    """Raise PefllError where the server does not know a client's key.

    The gate lets a known key through to Flower, which refuses the request and changes nothing: a client cannot be
    activated with heartbeats that have no time between them. Whatever else may be wrong is left to the client's
    process, which says it in its log.

    Args:
        address: of the server, host:port.
        authority: ca.crt of the federation.
        private_key: node.key of the client.
        name: of the client.
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
            f"{private_key} is no key of a client; ask the operator for the client's folder again", code="PEFLL-F106"
        ) from None
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0.0)
    try:
        with FleetHttpClient.from_server_address(
            address, False, authority.read_bytes(), interceptors=[signing]
        ) as server:
            server.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == _UNKNOWN:
            raise PefllError(
                f"the server at {address} does not know the key of {name}: ask its operator to run `pefll flower add "
                f"FEDERATION {name}` and to send the folder that it makes; or the clock of this machine is wrong",
                code="PEFLL-F103",
            ) from None
    except (httpx.HTTPError, OSError):  # a server that was here a moment ago; the client's process waits for it
        return
