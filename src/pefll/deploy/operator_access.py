"""The operator's way to the server: an address on this machine and a secret, where Flower's own commands find them.

Both are in the federation's own Flower home, which only its owner can read. `flwr` takes them from there when
`FLWR_HOME` names it: it sends the secret as the access token of an account.
"""

from __future__ import annotations

import io
import secrets
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError
from pefll.deploy.plan import CONNECTION

try:
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None

CREDENTIALS = "credentials.yaml"


def new_token() -> str:
    """Return a new secret for the operator."""
    return secrets.token_urlsafe(32)


def write_access(home: Path, address: str, authority: Path, token: str) -> None:
    """Write address and secret to where `flwr` finds them; those of an earlier server are replaced.

    Args:
        home: Flower's home of this process, and the federation's own.
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
    store = FileCredentialStore(place)  # it writes 0600 and all at once
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())


class OperatorAccount(NoOpControlAuthnPlugin):  # type: ignore[misc]
    """Flower's own check of accounts, with one account: whoever has the secret.

    The port has asked for it already (`gateway.OperatorGateway`); Flower asks for it again.

    Args:
        token: the secret.
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def validate_tokens_in_metadata(self, metadata: Any) -> tuple[bool, AccountInfo | None]:
        """Return whether a request has the secret, and whose account that is."""
        given = [str(value) for _, value in metadata]
        if len(given) != 1 or not secrets.compare_digest(given[0].encode(), self._token.encode()):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
