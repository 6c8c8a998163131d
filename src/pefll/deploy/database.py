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
# Missing or unexpected tables, a corrupt file, a file that is no database. Not a full disk, a lock or missing rights.
_DAMAGES = ("SQLITE_ERROR", "SQLITE_CORRUPT", "SQLITE_NOTADB")


class _WrongTables(Exception):
    """A database has other tables than Flower's."""


def _wrong_tables(*words: Any, **named: Any) -> NoReturn:
    raise _WrongTables(*words)


# Flower would exit here. Its thread kills the process some seconds later, even if the exception is caught.
migrations.flwr_exit = _wrong_tables


def with_database(make: Callable[[], T], database: Path | None, report: Callable[[str], None]) -> T:
    """Return what `make` returns; if the database is damaged, rename it and call `make` again.

    The server loses nothing: it registers clients again from their keys, and a run resumes from its folder.

    Args:
        make: opens or creates the database.
        database: its file; None for one in memory.
        report: gets a sentence about a renamed database.
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
            report(f"{database} was damaged and is now {aside.name}; a new one is made, and clients are admitted again")
            return make()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay signals that end the process until the end of the block: half-made tables would be unusable."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    # A signal mask would not do: it is per thread, and the system would deliver the signal to another one.
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
    """Return the first two words of SQLite's error name, such as SQLITE_CORRUPT."""
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
