"""Messages between processes: what is sent comes back, and nothing but message types can be named."""

from __future__ import annotations

import pytest
import torch

from pefll.core.tree import leaves
from pefll.engines.serial import SerialEngine
from pefll.engines.wire import pack, unpack
from pefll.methods import build_method
from tests.federations import problem_of, ragged


def test_messages_come_back_as_they_were_sent():
    federation = ragged()
    server = SerialEngine(federation, build_method("pefll", problem_of(federation), {}), 0, 2).start()
    header, (one, two) = unpack(pack(server, torch.arange(3), round=4, task="x"))
    assert header == {"round": 4, "task": "x"}
    assert type(one) is type(server)
    for sent, got in zip(leaves(server), leaves(one), strict=True):
        assert torch.equal(sent, got)
        assert sent.dtype == got.dtype
    assert two.tolist() == [0, 1, 2]


def test_a_message_cannot_name_anything_but_message_types():
    from pefll.methods.averaging import Server

    message = pack(Server(torch.zeros(1)))
    for module, name in (("os", "system"), ("builtins", "tuple"), ("not_loaded", "X")):
        forged = message.replace(b'"pefll.methods.averaging", "Server"', f'"{module}", "{name}"'.encode())
        size = int.from_bytes(message[:4], "little") + len(forged) - len(message)
        with pytest.raises(ValueError, match="is not a message type"):
            unpack(size.to_bytes(4, "little") + forged[4:])
