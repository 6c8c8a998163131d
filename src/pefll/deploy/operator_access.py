"""The operator's access to the server: an address on this machine and a secret.

Both are in the federation's own Flower home, which only its owner can read. `flwr` reads them there if `FLWR_HOME`
names that folder, and sends the secret as the access token of an account.
"""

from __future__ import annotations

import io
import secrets
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from pefll.deploy.plan import CONNECTION

CREDENTIALS = "credentials.yaml"


def new_token() -> str:
    """Return a new secret for the operator."""
    return secrets.token_urlsafe(32)


def write_access(home: Path, address: str, authority: Path, token: str) -> None:
    """Write address and secret where `flwr` reads them, in place of those of an earlier server.

    Args:
        home: the federation's own Flower home; `FLWR_HOME` of this process must name it.
        address: of the operator's port, host:port.
        authority: ca.crt.
        token: the secret.
    """
    from flwr.cli.flower_config import init_flwr_config, write_superlink_connection
    from flwr.cli.typing import SuperLinkConnection

    with redirect_stdout(io.StringIO()):
        init_flwr_config()
    write_superlink_connection(
        SuperLinkConnection(name=CONNECTION, address=address, root_certificates=str(authority.resolve()))
    )
    place = home / CREDENTIALS
    place.unlink(missing_ok=True)
    store = FileCredentialStore(place)  # it writes atomically, with mode 0600
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())


class OperatorAccount(NoOpControlAuthnPlugin):  # type: ignore[misc]
    """Flower's check of accounts, with one account: the operator's, by the secret.

    `gateway.OperatorGateway` has checked the secret before.

    Args:
        token: the secret.
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def validate_tokens_in_metadata(self, metadata: Any) -> tuple[bool, AccountInfo | None]:
        """Return whether a request has the secret, and the operator's account."""
        given = [str(value) for _, value in metadata]
        if len(given) != 1 or not secrets.compare_digest(given[0].encode(), self._token.encode()):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
