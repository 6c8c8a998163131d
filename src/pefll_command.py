"""The command `pefll`. This file is outside of the package, so that Ctrl-C works while the package is imported."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C prints one sentence and no traceback."""
    try:
        from pefll.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped before anything was begun\n")
        sys.exit(130)
    finally:
        # Libraries take a second to shut down. In that second, Ctrl-C would only print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
