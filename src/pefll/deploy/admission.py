"""Who may come in: the keys in a federation's folder, and nobody else.

`keys/NAME.pub` is the only list there is. Flower's database follows it: at the start and whenever the folder changes,
keys that are not in it are unregistered and those that are new are registered under the names of their files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.errors import PefllError
from pefll.deploy.certificates import public_key_as_pem

try:
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.state.schema.linkstate_models import Node
    from sqlalchemy import update
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None


_SCAN_SECONDS = 1.0  # of thousands of keys every one cannot be looked at for each request


class Change(NamedTuple):
    """What a look at the folder has changed in Flower's database.

    Attributes:
        new: names of the clients that are let in now.
        removed: names under which other keys were registered; they are registered no more.
    """

    new: list[str]
    removed: list[str]


class _Stamp(NamedTuple):
    """What a folder of keys looks like from outside.

    Attributes:
        folder: when it was changed.
        files: name and state of each key's file.
    """

    folder: int
    files: tuple[tuple[str | int, ...], ...]


def _modified(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _state(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; nothing where it cannot be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class Admission:
    """The keys of a federation, and Flower's database made to agree with them.

    Args:
        folder: with NAME.pub for each client.
        state: Flower's database of nodes.
        report: is told, in sentences, who is let in and who is not.
    """

    def __init__(self, folder: Path, state: Any, report: Callable[[str], None]) -> None:
        self._folder, self._state, self._report = folder, state, report
        self._lock = threading.Lock()
        self._seen: _Stamp | None = None
        self._scanned = 0.0
        self._names: dict[bytes, str] = {}

    def has_changed(self) -> bool:
        """Return whether keys came, went or were replaced since the last look; cheap enough for every request.

        A file that was written in place leaves no trace in the folder itself. It is noticed within a second.
        """
        now, seen = time.monotonic(), self._seen
        if seen is None or seen.folder != _modified(self._folder):
            return True
        if now - self._scanned < _SCAN_SECONDS:
            return False
        if self._stamp() != seen:
            return True
        self._scanned = now
        return False

    @property
    def admitted(self) -> int:
        """How many clients may come in."""
        return len(self._names)

    def name_of(self, public_key: bytes) -> str | None:
        """Return the client that a key, as PEM, was put there for; None for a stranger's."""
        return self._names.get(public_key)

    def look(self) -> Change:
        """Read the folder, and make Flower's database agree with it."""
        with self._lock:
            stamp = self._stamp()
            self._names = self._read()
            removed = self._remove_others()
            new = [name for key, name in self._names.items() if self._let_in(key, name)]
            self._seen = stamp  # only now: where the database fails, the next request tries again
        for name in removed:
            self._report(f"a key registered as {name!r} is not in {self._folder}: it is registered no more")
        return Change(new, removed)

    def _stamp(self) -> _Stamp:
        folder = _modified(self._folder)
        return _Stamp(folder, tuple((path.name, *_state(path)) for path in sorted(self._folder.glob("*.pub"))))

    def _read(self) -> dict[bytes, str]:
        """Return the names of clients by their keys; a key that two files have is nobody's."""
        owners: dict[bytes, list[str]] = {}
        for path in sorted(self._folder.glob("*.pub")):
            try:
                owners.setdefault(public_key_as_pem(path), []).append(path.stem)
            except PefllError as error:
                self._report(f"{error}; nobody is let in with it")
        for names in owners.values():
            if len(names) > 1:
                self._report(f"{' and '.join(names)} have the same key in {self._folder}: none of them is let in")
        return {key: names[0] for key, names in owners.items() if len(names) == 1}

    def _remove_others(self) -> list[str]:
        removed = []
        for node in self._state.get_node_info():
            if node.status == NodeStatus.UNREGISTERED:
                continue
            if self._names.get(node.public_key) != node.name:
                self._state.delete_node(node.owner_aid, node.node_id)
                if node.public_key not in self._names:
                    removed.append(node.name or "")
        return removed

    def _let_in(self, key: bytes, name: str) -> bool:
        """Register a key where it is not registered yet; return whether it was not."""
        if self._state.get_node_id_by_public_key(key) is not None:
            return False
        try:
            self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL, name=name)
        except ValueError:  # a key that was removed, or had another name, is back: Flower would never take it again
            if not hasattr(self._state, "session"):  # a database in memory
                self._report(f"{name} is let in when the server is started again")
                return False
            back = {"status": NodeStatus.REGISTERED, "unregistered_at": None, "online_until": None, "name": name}
            with self._state.session() as session:
                session.execute(update(Node).where(Node.public_key == key).values(**back))
        return True
