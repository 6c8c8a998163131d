"""Admits the clients that have a key in the federation's folder, and nobody else.

The files `keys/NAME.pub` are the only list of clients. The server updates Flower's database at its start and whenever
this folder changes. It unregisters keys that are not in the folder. It registers new keys under their files' names.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.constant import NodeStatus
from flwr.supercore.state.schema.linkstate_models import Node
from sqlalchemy import update

from pefll.core.errors import PefllError
from pefll.deploy.certificates import public_key_as_pem

_SCAN_SECONDS = 1.0  # to check thousands of files for each request would take too long


class Change(NamedTuple):
    """Changes that `update` made in Flower's database: names of newly registered clients, and names of removed ones."""

    new: list[str]
    removed: list[str]


class _Stamp(NamedTuple):
    """State of a folder of keys: the time of the folder's last change, and each key file's name and state."""

    folder: int
    files: tuple[tuple[str | int, ...], ...]


def _modified(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _state(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file is written or replaced; () if the file is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class Admission:
    """The keys of a federation; `update` makes Flower's database agree with the folder of keys.

    Args:
        folder: folder with NAME.pub for each client.
        state: Flower's database of nodes.
        report: function that gets a sentence for each refused or removed key.
    """

    def __init__(self, folder: Path, state: Any, report: Callable[[str], None]) -> None:
        self._folder, self._state, self._report = folder, state, report
        self._lock = threading.Lock()
        self._seen: _Stamp | None = None
        self._scanned = 0.0
        self._names: dict[bytes, str] = {}

    def has_changed(self) -> bool:
        """Return whether keys were added, removed or replaced since the last `update`.

        The check is fast enough for every request. A file that is overwritten in place does not change the folder's
        time; such a change is noticed within a second.
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
        """Number of clients with a valid key."""
        return len(self._names)

    def name_of(self, public_key: bytes) -> str | None:
        """Return the name of the client that has this public key (PEM); None for an unknown key."""
        return self._names.get(public_key)

    def update(self) -> Change:
        """Read the folder, and update Flower's database."""
        with self._lock:
            stamp = self._stamp()
            self._names = self._read()
            removed = self._unregister_others()
            new = [name for key, name in self._names.items() if self._register(key, name)]
            self._seen = stamp  # comes last, so that the next request tries again if the database fails
        for name in removed:
            self._report(f"a key registered as {name!r} is not in {self._folder}: it is removed")
        return Change(new, removed)

    def _stamp(self) -> _Stamp:
        folder = _modified(self._folder)
        return _Stamp(folder, tuple((path.name, *_state(path)) for path in sorted(self._folder.glob("*.pub"))))

    def _read(self) -> dict[bytes, str]:
        """Return the names of clients by key; keys that occur in two files are left out."""
        owners: dict[bytes, list[str]] = {}
        for path in sorted(self._folder.glob("*.pub")):
            try:
                owners.setdefault(public_key_as_pem(path), []).append(path.stem)
            except PefllError as error:
                self._report(f"{error}; no client is admitted with this key")
        for names in owners.values():
            if len(names) > 1:
                self._report(f"{' and '.join(names)} have the same key in {self._folder}: none of them is admitted")
        return {key: names[0] for key, names in owners.items() if len(names) == 1}

    def _unregister_others(self) -> list[str]:
        removed = []
        for node in self._state.get_node_info():
            if node.status == NodeStatus.UNREGISTERED:
                continue
            if self._names.get(node.public_key) != node.name:
                self._state.delete_node(node.owner_aid, node.node_id)
                if node.public_key not in self._names:
                    removed.append(node.name or "")
        return removed

    def _register(self, key: bytes, name: str) -> bool:
        """Register a key unless it is registered already; return whether it was new."""
        if self._state.get_node_id_by_public_key(key) is not None:
            return False
        try:
            self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL, name=name)
        except ValueError:  # Flower refuses a key that was removed or renamed before
            if not hasattr(self._state, "session"):  # a database in memory
                self._report(f"{name} will be admitted after a restart of the server")
                return False
            back = {"status": NodeStatus.REGISTERED, "unregistered_at": None, "online_until": None, "name": name}
            with self._state.session() as session:
                session.execute(update(Node).where(Node.public_key == key).values(**back))
        return True
