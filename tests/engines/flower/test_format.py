"""The format of messages, byte for byte, and what peers that speak another one are told.

Where a test with fixed bytes fails, messages have changed: raise FORMAT in message.py, then write the new bytes here.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from pefll.core.errors import PefllError
from pefll.engines.flower.protocol.environment import PIECE, check_environment, piece_bytes
from pefll.engines.flower.protocol.message import FORMAT, RECORD, BadMessage, header_of, pack, sender_of, tensors_of
from pefll.version import __version__
from tests.engines.flower.federations import setting

FLOATS = bytes.fromhex("0000803f 000020c0 0000c07f")  # 1, -2.5, NaN
WIDE = bytes.fromhex("182d4454fb210940")  # pi
WHOLE = bytes.fromhex("0102000000000000 feffffffffffffff")  # 513, -2
TRUTHS = bytes.fromhex("010001")
BY_HAND = {
    "format": 3,
    "version": __version__,
    "header": '{"name":"\\u00e5sa","round":7}',
    "tensors": '[["a","<f4",[3,1]],["b","<f8",[]],["none","<f4",[2,0]],["c","<i8",[2]],["d","|b1",[3]]]',
    "numbers": FLOATS + WIDE + WHOLE + TRUTHS,
}


def test_a_message_of_these_bytes_is_read_as_these_numbers():
    content = RecordDict({"pefll": ConfigRecord(BY_HAND)})
    assert header_of(content) == {"name": "åsa", "round": 7}
    found = tensors_of(content)
    assert found["a"].dtype == torch.float32
    assert found["a"][:2].tolist() == [[1.0], [-2.5]]
    assert found["a"][2].isnan().all()
    assert found["b"].dtype == torch.float64
    assert found["b"].item() == 3.141592653589793
    assert found["none"].shape == (2, 0)
    assert found["c"].tolist() == [513, -2]
    assert found["d"].tolist() == [True, False, True]


def test_these_numbers_are_written_as_these_bytes():
    leaves = {
        "a": torch.tensor([[1.0], [-2.5], [float("nan")]]),
        "b": torch.tensor(3.141592653589793, dtype=torch.float64),
        "none": torch.empty(2, 0),
        "c": torch.tensor([513, -2]),
        "d": torch.tensor([True, False, True]),
    }
    assert dict(pack({"round": 7, "name": "åsa"}, leaves)[RECORD]) == BY_HAND
    assert FORMAT == 3


def test_flower_writes_the_record_as_these_bytes():
    """What is below our format: it is Flower's, which is pinned, and would be noticed here if it changed."""
    content = pack({}, {"a": torch.tensor([1, 258])})
    body = content[RECORD].deflate().partition(b"\0")[2]
    for part in (b"numbers", bytes([1, *[0] * 7, 2, 1, *[0] * 6]), b'[["a","<i8",[2]]]', b"{}", __version__.encode()):
        assert part in body


def of_format_1():
    """Return a message as the first versions wrote it."""
    numbers = Array("float32", (2,), "pefll.raw", b"12345678")
    return RecordDict({RECORD: ConfigRecord({"format": 1, "header": "{}"}), "tensors": ArrayRecord({"0": numbers})})


def of_format(number, header='{"name": "client-001"}'):
    """Return a message as another version wrote it or will write it."""
    return RecordDict({RECORD: ConfigRecord({"format": number, "header": header, "else": [1.0]})})


def of_version(text):
    content = pack({"name": "client-001"}, {})
    content[RECORD]["version"] = text
    return content


OTHERS = {
    "format 1": (
        of_format_1,
        "uses format 1, but this server uses 3: upgrade pefll on the client's machine",
        "uses format 1, but this client uses 3: upgrade pefll on the server's machine",
    ),
    "format 2": (
        lambda: of_format(2),
        "uses format 2, but this server uses 3: upgrade pefll on the client's machine",
        "uses format 2, but this client uses 3: upgrade pefll on the server's machine",
    ),
    "format 4": (
        lambda: of_format(4),
        "uses format 4, but this server uses 3: upgrade pefll on the server's machine",
        "uses format 4, but this client uses 3: upgrade pefll on the client's machine",
    ),
    "a format in words": (
        lambda: of_format("x" * 100),
        "uses an unknown format, but this server uses format 3: check its version of pefll",
        "uses an unknown format, but this client uses format 3: check its version of pefll",
    ),
    "a newer pefll": (
        lambda: of_version("9.9.9"),
        f"has pefll 9.9.9, but this server has {__version__}: install the same on both",
        f"has pefll 9.9.9, but this client has {__version__}: install the same on both",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_server_says_of_a_client_of_another_version_who_it_is_and_what_to_do(other, tmp_path):
    content, sentence, _ = OTHERS[other]
    here = setting(tmp_path)
    here.grid.transport = lambda node, request, deliver: (
        [Message(content(), reply_to=request)] if node == 1001 else [deliver(request)]
    )
    said: list[str] = []
    engine = here.engine(report=said.append)
    assert engine.roster.present() == [0, 2, 3, 4, 5]
    engine.close()
    who = "node 1001, asked who it is," if other == "format 1" else "client client-001"
    assert said == [f"{who} {sentence}"]


@pytest.mark.parametrize("other", OTHERS)
def test_a_client_says_of_a_server_of_another_version_what_to_do_and_tells_it_too(other, tmp_path, caplog):
    content, _, sentence = OTHERS[other]
    here = setting(tmp_path)
    replies = []

    def from_another_server(node, request, deliver):
        request.content = content()
        replies.append(deliver(request))
        return [replies[-1]]

    here.grid.transport = from_another_server
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        engine = here.engine()
        assert engine.roster.present() == []
        engine.close()
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert f"the server {sentence}" in caplog.messages
    told = header_of(replies[1].content)
    assert told == {
        "name": "client-001",
        "refusal": f"could not read the request: the server {sentence}",
    }


def test_the_name_of_a_sender_is_read_where_nothing_else_is():
    assert sender_of(of_format(2)) == "client-001"
    assert sender_of(of_format(7, '{"name": "a\\nb"}')) == "a?b"
    for content in (RecordDict(), of_format_1(), of_format(2, "[]"), of_format(2, "[" * 9000), of_format(2, "no json")):
        assert sender_of(content) == ""
    with pytest.raises(BadMessage, match=rf"\b2\b.* {FORMAT}\b"):
        header_of(of_format(2))


@pytest.mark.parametrize("value", ["0", "-5", "nonsense", "", "1e6", "3"])
def test_nonsense_in_the_environment_is_told_in_a_sentence(value):
    assert piece_bytes({}) == 5_242_880
    assert piece_bytes({PIECE: "2048"}) == 2048
    with pytest.raises(PefllError, match=r"1,024.*PEFLL-F455"):
        check_environment({PIECE: value})
    with pytest.raises(PefllError, match=r"CONCURRENT_OBJ_PULLS.*'0'.*PEFLL-F455"):
        check_environment({"FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": "0"})


@pytest.mark.parametrize("value", ["0", pytest.param("nonsense", marks=pytest.mark.slow)])
def test_a_command_in_such_an_environment_says_so_and_nothing_else(value, tmp_path):
    command = [sys.executable, "-m", "pefll", "flower", "server", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {PIECE: value}, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"the environment sets {PIECE} to {value!r}" in done.stderr
    assert "Traceback" not in done.stderr
    code = "import pefll.engines.flower.client.app"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {PIECE: value}, capture_output=True, text=True, timeout=120
    )
    assert f"PefllError: the environment sets {PIECE} to {value!r}" in done.stderr
