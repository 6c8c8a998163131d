"""Whether the server would let a client in, asked before the client's processes are started."""

from __future__ import annotations

from pathlib import Path

from pefll.errors import PefllError

# The server looks for the key first and at the interval of heartbeats then: so an interval that cannot be is refused
# in one way where it knows the key and in another where it does not, and nothing changes on the server.
_IMPOSSIBLE_INTERVAL = 0.0


def check_key_known(address: str, authority: Path, private_key: Path, name: str) -> None:
    """Raise PefllError where the server does not know a client's key.

    A SuperNode with an unknown key ends with the same words as one whose predecessor is still connected. Whatever else
    may be wrong is left to the SuperNode, which says it in its log.

    Args:
        address: of the server, host:port.
        authority: ca.crt of the federation.
        private_key: node.key of the client.
        name: of the client.
    """
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
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
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=_IMPOSSIBLE_INTERVAL)
    try:
        with FleetHttpClient.from_server_address(
            address, False, authority.read_bytes(), interceptors=[signing]
        ) as server:
            server.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        answer = FlowerError.from_json(error.response.text)
        if answer is not None and answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            raise PefllError(
                f"the server at {address} does not know the key of {name}: ask its operator to run `pefll flower add "
                f"FEDERATION {name}` and to send the folder that it makes",
                code="PEFLL-F103",
            ) from None
    except (httpx.HTTPError, OSError):  # a server that was here a moment ago; the SuperNode waits for it
        return
