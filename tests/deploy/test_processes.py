"""A representative part with real processes: a server and three clients, TLS and keys; all that is started is ended.

`make test-faults` does the whole matrix in this way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.core.errors import PefllError
from pefll.deploy.certificates import make_certificates
from pefll.deploy.loopback import Loopback
from pefll.deploy.processes import environment
from pefll.deploy.server_check import check_server
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.terms import Terms
from tests.deploy.process_search import WORD, alive_with, wait_until
from tests.engines.flower.deployment import APPS, deploy, result, start
from tests.engines.flower.federations import SEED, WithoutSome, setting, sha256
from tests.engines.flower.matrix import strangers

CLIENTS, BAD = 3, 1


def wait_for(process, path, words, seconds=120):
    ends = time.monotonic() + seconds
    while words not in path.read_text(errors="replace"):
        assert process.poll() is None, path.read_text(errors="replace")
        assert time.monotonic() < ends, path.read_text(errors="replace")
        time.sleep(0.2)


def test_objects_come_one_at_a_time_unless_the_user_wants_more(monkeypatch):
    names = [f"FLWR_PRIVATE_MAX_CONCURRENT_OBJ_{way}" for way in ("PULLS", "PUSHES")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [environment()[name] for name in names] == ["1", "1"]
    monkeypatch.setenv(names[0], "4")
    assert [environment()[name] for name in names] == ["4", "1"]


# As Flower's node: asked once it says farewell, asked again it is gone.
POLITE = """
import signal, sys, time
from pathlib import Path
def leave(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1], "farewell").touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""


def test_a_process_is_asked_once_to_end_and_can_say_farewell(tmp_path):
    places = [tmp_path / name for name in ("first", "second")]
    with Loopback(tmp_path / "logs", tmp_path / "home") as processes:
        for place, seconds in zip(places, ("0.2", "1"), strict=True):
            place.mkdir()
            processes.start(place.name, [sys.executable, "-S", "-c", POLITE, str(place), seconds])
        wait_until(lambda: all((place / "ready").exists() for place in places), 20)
        processes.end("first", "second")
    assert all((place / "farewell").exists() for place in places)


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_server_and_client_in_the_foreground_leave_nobody_behind(number, status, tmp_path):
    here = setting(tmp_path, clients=1)
    there = deploy(here, tmp_path / "p", clients_per_round=1)
    data = str(tmp_path / "client-000.npz")
    verbs = {
        "server": (["server", str(there.folder)], "1 client may connect, of which 1 new"),
        "client": (["client", str(there.folder), "--name", "client-000", "--data", data], "SuperNode ID"),
    }
    started = {}
    try:
        for name, (words, sign) in verbs.items():
            output = tmp_path / f"{name}.log"
            mine = {WORD: f"{tmp_path}-{name}"}
            with output.open("wb") as file:
                command = [sys.executable, "-m", "pefll", "flower", *words]
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment() | mine, start_new_session=True
                )
            started[name] = process, mine
            wait_for(process, output, sign)
            wait_until(lambda mine=mine: len(alive_with(mine)) >= 3, 30)  # itself, a watchdog, and one of Flower's
        for process, mine in reversed(started.values()):
            process.send_signal(number)
            assert process.wait(20) == status
            wait_until(lambda mine=mine: not alive_with(mine), 15)
    finally:
        for process, mine in started.values():
            for pid in [process.pid, *alive_with(mine)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def test_a_deployment_ends_with_the_same_bits_as_the_serial_engine_without_the_offender(tmp_path):
    here = setting(tmp_path, clients=CLIENTS)
    terms = Terms(exchange_seconds=90, round_seconds=600, quorum=0.5, patience_seconds=60)
    with deploy(here, tmp_path / "p", APPS, rounds=2, clients_per_round=CLIENTS, terms=terms) as there:
        others = strangers(there, here)
        start(there, here, {BAD: "nan@1.1"})
        for name, command in others.items():
            there.start(name, command)
        there.run(480)
        found = result(there)
        let_in = there.log("server").count("Activated node_id")
        make_certificates(tmp_path / "other", ["127.0.0.1"])
        with pytest.raises(PefllError, match="PEFLL-F418"):
            check_server(there.address, tmp_path / "other" / "ca.crt")
        check_server(there.address, there.folder / "server" / "ca.crt")
        started = list(there.running.values())
    assert all(process.poll() is not None for process in started), "a process outlived the test"
    serial = WithoutSome(here.federation, here.agreement.build(), SEED, CLIENTS)
    serial.absent = {1: {BAD}}
    expected = serial.advance(serial.start(), 0, 2)
    serial.close()
    assert found["sha256"] == sha256(expected)
    assert found["dropped"] == [[1, client_name(BAD), "sent NaN or infinity in adapt"]]
    assert let_in == CLIENTS, "a node without a known key, without TLS or with another authority was let in"
    with pytest.raises(PefllError, match="PEFLL-F420"):
        check_server(there.address, there.folder / "server" / "ca.crt")
