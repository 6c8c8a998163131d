"""The process of the server's app: Flower's own, but that the token of the run comes through a pipe."""

from __future__ import annotations

import sys

from pefll.core.errors import PefllError

try:
    from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None


def main() -> None:
    """Read the token and do the run; it is never in the argument list that the system shows to everybody."""
    token = sys.stdin.readline().strip()
    sys.stdin.close()
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", token]
    flwr_serverapp()


if __name__ == "__main__":
    main()
