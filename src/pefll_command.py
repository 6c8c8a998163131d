"""The command `pefll`, outside of the package: importing that takes seconds, in which Ctrl-C is no accident either."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C at any time is one sentence."""
    try:
        from pefll.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped before anything was begun\n")
        sys.exit(130)
    finally:
        # All is said and done: libraries take a second to leave, and an impatient Ctrl-C would only show a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
