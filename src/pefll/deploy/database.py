"""Flower's database: made whole or not at all, and set aside where it is damaged."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors

try:
    from alembic.util.exc import CommandError
    from flwr.supercore.state.alembic import utils as migrations
    from sqlalchemy.exc import DBAPIError
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None

T = TypeVar("T")
# Tables that should not be there or should be, a file that is broken, one that is no database. That a disk is full, or
# that a file is locked or may not be read, is no damage.
_DAMAGES = ("SQLITE_ERROR", "SQLITE_CORRUPT", "SQLITE_NOTADB")


class _WrongTables(Exception):
    """A database has tables, and not those that Flower makes."""


def _wrong_tables(*words: Any, **named: Any) -> NoReturn:
    raise _WrongTables(*words)


# Flower would end the process here, with a thread that kills it some seconds later whatever becomes of the exception.
migrations.flwr_exit = _wrong_tables


def with_database(make: Callable[[], T], database: Path | None, report: Callable[[str], None]) -> T:
    """Make what opens a database; where the database is damaged, put it out of the way and make it again.

    Nothing is lost that the server needs: clients are let in again from their keys, and a run goes on from its folder.

    Args:
        make: opens the database, or makes a new one.
        database: its file; None for one in memory.
        report: is told what was set aside.
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
            report(f"{database} was damaged and is now {aside.name}; a new one is made, and clients are let in again")
            return make()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let signals to end wait until the end of the block: tables that are half made cannot be used any more."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread
        return
    # Not by a mask: that is one thread's, and the system would give the signal to another one.
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
    """Return SQLite's name of an error, without what it adds after a second underline."""
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
