"""A server that was killed while it made its database starts again; one that is asked to end then ends afterwards."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

import sqlalchemy
from flwr.supercore.state.alembic.utils import run_migrations
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.main import create_app

from pefll.core.errors import PefllError
from pefll.deploy.database import with_database
from pefll.deploy.folder import make_federation
from pefll.deploy.plan import Plan
from pefll.deploy.superlink import _config
from tests.engines.flower.federations import setting


def half_made(path):
    with sqlite3.connect(path) as database:
        database.execute("create table node (x)")
        database.execute("create table task_usage (x)")
    database.close()


def half_migrated(path):
    """As a kill leaves it: the newest table is there, and the number says that it is not."""
    run_migrations(sqlalchemy.create_engine(f"sqlite:///{path}"))
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = '8e65d8ae60b0'")
    database.close()


def no_database(path):
    path.write_bytes(b"something else " * 1000)


@pytest.mark.parametrize("damage", [half_made, half_migrated, no_database])
def test_a_damaged_database_is_set_aside_and_made_again(damage, tmp_path):
    here = setting(tmp_path, clients=2)
    folder, database = tmp_path / "fed", tmp_path / "superlink.db"
    make_federation(folder, Plan(here.agreement, ("alice", "bob")), "127.0.0.1:8000")
    config = _config(folder, 1, database, "token")
    damage(database)
    before = database.read_bytes()
    said = []
    app = with_database(lambda: create_app(config, SuperLinkLifespan), database, said.append)
    assert app.state.linkstate_factory.state().get_node_info() == []
    (sentence,) = said
    assert "superlink.db.damaged-1;" in sentence
    assert (tmp_path / "superlink.db.damaged-1").read_bytes()[:8] == before[:8]
    with_database(lambda: create_app(config, SuperLinkLifespan), database, said.append)
    assert len(said) == 1, "the new one is whole"
    assert not [thread for thread in threading.enumerate() if "force_exit" in thread.name], "Flower ends the process"


def test_a_database_that_cannot_be_read_is_left_where_it_is(tmp_path):
    database = tmp_path / "superlink.db"
    half_made(database)

    def make():
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorname = "SQLITE_BUSY"
        raise sqlalchemy.exc.OperationalError("", {}, error)

    with pytest.raises(PefllError) as told:
        with_database(make, database, print)
    assert told.value.code == "PEFLL-F301"
    assert [path.name for path in tmp_path.iterdir()] == ["superlink.db"]


def test_a_signal_waits_until_the_database_is_made():
    done, came = [], []

    def make():
        os.kill(os.getpid(), signal.SIGTERM)
        done.append(len(came))

    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        with_database(make, None, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (done, came) == ([0], [True])
