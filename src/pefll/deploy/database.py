"""Opens Flower's database; a damaged one is renamed, and a new one is made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from alembic.util.exc import CommandError
from flwr.supercore.state.alembic import utils as migrations
from sqlalchemy.exc import DBAPIError

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors

T = TypeVar("T")
# Errors for wrong tables, a corrupt file, or no database. A full disk, a lock or missing rights are no damage.
_DAMAGES = ("SQLITE_ERROR", "SQLITE_CORRUPT", "SQLITE_NOTADB")


class _WrongTables(Exception):
    """The database does not have the tables that Flower expects."""


def _wrong_tables(*words: Any, **named: Any) -> NoReturn:
    raise _WrongTables(*words)


# Flower's `flwr_exit` would start a thread that kills the process after some seconds, even if its exception is caught.
migrations.flwr_exit = _wrong_tables


def with_database(make: Callable[[], T], database: Path | None, report: Callable[[str], None]) -> T:
    """Return the result of `make`; if the database is damaged, rename the file and call `make` again.

    Nothing is lost: the server registers clients again from their keys, and a run resumes from its folder.

    Args:
        make: function that opens or creates the database.
        database: file of the database; None for a database in memory.
        report: function that gets a sentence if a database was renamed.
    """
    with _signals_wait():
        try:
            return make()
        except (DBAPIError, CommandError, _WrongTables) as error:
            if database is None or not database.exists():
                raise
            if isinstance(error, DBAPIError) and _kind(error) not in _DAMAGES:
                raise PefllError(
                    f"{database} cannot be opened ({error.orig}); make it readable and writable, and start again",
                    code="PEFLL-F301",
                ) from error
            aside = _set_aside(database)
            report(f"{database} is damaged and now called {aside.name}; a new one admits the same clients again")
            return make()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay signals that end the process until the end of the block, because half-made tables would be unusable."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    # A signal mask would not help: it holds for one thread, and the system would give the signal to another thread.
    came: list[int] = []
    ends = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(number))]
    ends += [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


def _kind(error: DBAPIError) -> str:
    """Return the first two words of SQLite's error name, for example SQLITE_CORRUPT."""
    return "_".join(str(getattr(error.orig, "sqlite_errorname", "")).split("_")[:2])


def _set_aside(database: Path) -> Path:
    number = 1
    while (aside := database.with_name(f"{database.name}.damaged-{number}")).exists():
        number += 1
    with sentences_for_disk_errors(str(database)):
        for more in ("-wal", "-shm", ""):
            part = database.with_name(database.name + more)
            if part.exists():
                part.rename(aside.with_name(aside.name + more))
    return aside
