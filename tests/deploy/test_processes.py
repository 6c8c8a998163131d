"""A representative part with real processes: a server and three clients, TLS and keys; all that is started is ended.

`make test-faults` does the whole matrix in this way.
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.deploy.certificates import make_certificates
from pefll.deploy.processes import check_server
from pefll.engines.flower.engine import Terms
from pefll.engines.flower.member import client_name
from pefll.errors import PefllError
from tests.engines.flower.deployment import APPS, deploy, result, start
from tests.engines.flower.federations import SEED, WithoutSome, setting, sha256
from tests.engines.flower.matrix import strangers

CLIENTS, BAD = 3, 1


def test_a_deployment_ends_with_the_same_bits_as_the_serial_engine_without_the_offender(tmp_path):
    here = setting(tmp_path, clients=CLIENTS)
    terms = Terms(exchange_seconds=90, round_seconds=600, quorum=0.5, patience_seconds=60)
    with deploy(here, tmp_path / "p", APPS, rounds=2, clients_per_round=CLIENTS, terms=terms) as there:
        others = strangers(there, here)
        start(there, here, {BAD: "nan@1.1"})
        for name, command in others.items():
            there.start(name, command)
        there.run(300)
        found = result(there)
        let_in = there.log("server").count("Activated node_id")
        make_certificates(tmp_path / "other", ["127.0.0.1"])
        with pytest.raises(PefllError, match="is not this federation's"):
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
    with pytest.raises(PefllError, match="there is no server"):
        check_server(there.address, there.folder / "server" / "ca.crt")
