"""Whatever a client does: the round ends, and its result is that of a round in which the client was not there."""

from __future__ import annotations

import struct

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Error, Message

from pefll.core.errors import PefllError
from pefll.engines.flower.protocol.message import header_of, tensors_of
from pefll.engines.flower.server.terms import Terms
from tests.engines.flower.federations import (
    QUICK,
    ROUNDS,
    changed,
    flower_state,
    is_as_without,
    sampled,
    serial_state,
    setting,
    sha256,
    trouble,
)

ROUND = 1
exchanges = pytest.mark.parametrize("exchange", [0, 1, 2], ids=["describe", "adapt", "describe_backward"])


FAULTS = {
    "killed": (lambda request, deliver: [Message(Error(8, ""), reply_to=request)], "was killed"),
    "gone": (lambda request, deliver: [Message(Error(5, ""), reply_to=request)], "is gone"),
    "silent": (lambda request, deliver: [], "did not answer within"),
    "another round": (
        lambda r, d: changed(r, d, lambda header, tensors: (header | {"round": ROUND - 1}, tensors)),
        "answered with round 0 instead of 1",
    ),
    "another exchange": (
        lambda r, d: changed(r, d, lambda header, tensors: (header | {"exchange": 7}, tensors)),
        "answered with exchange 7",
    ),
    "another client": (
        lambda r, d: changed(r, d, lambda header, tensors: (header | {"client": 99}, tensors)),
        "answered with client 99",
    ),
    "another name": (
        lambda r, d: changed(r, d, lambda header, tensors: (header | {"name": "somebody"}, tensors)),
        "answered with name 'somebody'",
    ),
    "another shape": (
        lambda r, d: changed(r, d, lambda header, tensors: (header, {"0": tensors["0"][:-1]})),
        "instead of float32",
    ),
    "another dtype": (
        lambda r, d: changed(r, d, lambda header, tensors: (header, {"0": tensors["0"].long()})),
        "sent int64",
    ),
    "one tensor too many": (
        lambda r, d: changed(r, d, lambda header, tensors: (header, tensors | {"1": tensors["0"]})),
        "sent 2 tensors instead of 1",
    ),
    "NaN": (
        lambda r, d: changed(r, d, lambda header, tensors: (header, {"0": tensors["0"] * torch.nan})),
        "sent NaN or infinity",
    ),
    "a norm too large": (
        lambda r, d: changed(r, d, lambda header, tensors: (header, {"0": 1e6 * tensors["0"]})),
        "times as long as the median",
    ),
    "100 MB too much": (
        lambda r, d: changed(r, d, lambda header, tensors: (header, tensors | {"more": torch.zeros(25_000_000)})),
        "sent 100,",
    ),
}


def unreadable(request, deliver):
    from flwr.app import ConfigRecord, RecordDict

    del deliver
    return [Message(RecordDict({"surprise": ConfigRecord({"a": 1})}), reply_to=request)]


FAULTS["another kind of message"] = (unreadable, "not a pefll message")


@exchanges
@pytest.mark.parametrize("fault", FAULTS)
def test_the_result_is_that_of_a_round_without_the_offender(fault, exchange, tmp_path):
    here = setting(tmp_path)
    drawn = sampled(here, ROUND)
    offender = drawn[1]
    expected = sha256(serial_state(here, {ROUND: {offender}}))
    act, reason = FAULTS[fault]
    times = trouble(here, offender, ROUND, exchange, act)
    said: list[str] = []
    state, engine = flower_state(here, report=said.append)
    assert len(times) == 1, "the offender was asked again in the same round"
    assert sha256(state) == expected
    assert expected != sha256(serial_state(here))
    (dropped,) = engine.dropped
    assert dropped[:2] == (ROUND, f"client-{offender:03d}")
    assert reason in dropped[2]
    assert any(f"client-{offender:03d}" in line and reason in line for line in said)


UNFORESEEN = [
    OverflowError("int too large"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    RecursionError("too deep"),
    struct.error("unpack requires 8 bytes"),
    ValueError("a shape"),
    RuntimeError("of torch"),
    MemoryError(),
    AttributeError("no such thing"),
]


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
def test_whatever_the_reading_of_a_reply_raises_its_sender_is_left_out_and_the_run_goes_on(
    error, tmp_path, monkeypatch
):
    here = setting(tmp_path)
    offender = sampled(here, ROUND)[1]

    def act(request, deliver):
        return changed(request, deliver, lambda header, tensors: (header | {"evil": True}, tensors))

    def reading(content):
        if header_of(content).get("evil"):
            raise error
        return tensors_of(content)

    monkeypatch.setattr("pefll.engines.flower.server.reply.tensors_of", reading)
    trouble(here, offender, ROUND, 1, act)
    state, engine = flower_state(here)
    assert is_as_without(state, here, {ROUND: {offender}})
    reason = f"sent a reply that cannot be read ({type(error).__name__})"
    assert engine.dropped == [(ROUND, f"client-{offender:03d}", reason)]


def test_an_error_of_the_servers_own_is_nobodys_fault_and_ends_the_run(tmp_path, monkeypatch):
    def broken(self, *arguments):
        raise AttributeError("of our own aggregation")

    here = setting(tmp_path)
    engine = here.engine()
    state = engine.start()
    monkeypatch.setattr("pefll.engines.flower.server.cohort.FlowerCohort._assemble", broken)
    with pytest.raises(AttributeError, match="of our own aggregation"):
        engine.advance(state, 0, 1)
    engine.close()
    assert not engine.dropped


@exchanges
def test_a_reply_that_flower_itself_cannot_read_costs_nobody_else_anything(exchange, tmp_path):
    """Flower reads replies one after another, and where it stumbles those before are lost with it."""
    here = setting(tmp_path)
    offender = sampled(here, ROUND)[2]
    broken: set[str] = set()
    times = trouble(here, offender, ROUND, exchange, lambda r, d: [broken.add(r.metadata.message_id) or d(r)])
    pull = here.grid.pull_messages

    def stumbling(names):
        names = list(names)
        replies = pull(names)
        if broken & set(names):
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return replies

    push, sent = here.grid.push_messages, []

    def counting(messages):
        messages = list(messages)
        sent.extend(leaf.nbytes for message in messages for leaf in tensors_of(message.content).values())
        return push(messages)

    here.grid.pull_messages, here.grid.push_messages = stumbling, counting
    state, engine = flower_state(here)
    assert len(times) == 2, "the offender is asked once more, and then read alone"
    assert engine.ledger.down == sum(sent), "what was sent again counts again"
    assert is_as_without(state, here, {ROUND: {offender}})
    reason = "sent a reply that Flower cannot read (UnicodeDecodeError)"
    assert engine.dropped == [(ROUND, f"client-{offender:03d}", reason)]


def test_a_reply_at_which_flowers_server_fails_costs_nobody_else_anything(tmp_path):
    import httpx

    here = setting(tmp_path)
    offender = sampled(here, ROUND)[2]
    broken: set[str] = set()
    trouble(here, offender, ROUND, 0, lambda r, d: [broken.add(r.metadata.message_id) or d(r)])
    pull = here.grid.pull_messages

    def failing(names):
        names = list(names)
        if broken & set(names):
            raise httpx.HTTPStatusError("", request=httpx.Request("POST", "https://x"), response=httpx.Response(500))
        return pull(names)

    here.grid.pull_messages = failing
    state, engine = flower_state(here)
    assert is_as_without(state, here, {ROUND: {offender}})
    assert engine.dropped == [
        (ROUND, f"client-{offender:03d}", "sent a reply that Flower cannot read (HTTPStatusError)")
    ]


def test_a_reply_that_is_announced_and_never_sent_holds_nobody_beyond_the_deadline():
    """Flower's own grid, with a server that has one whole reply and one of which a part never comes."""
    import time
    from types import SimpleNamespace

    from flwr.app import RecordDict
    from flwr.common.serde import message_to_proto
    from flwr.proto.message_pb2 import PullObjectResponse
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid.http_grid import HttpGrid

    from pefll.engines.flower.server.exchange import OutgoingRequest, exchange

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    began = time.monotonic()
    replies, parts = {}, {}
    for name, node in (("first", 1001), ("second", 1002)):
        asked = Message(RecordDict(), node, "query", ttl=60.0)
        asked.metadata.__dict__["_message_id"] = name
        reply = Message(RecordDict(), reply_to=asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        replies[name] = reply
        if name == "second":
            parts |= {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}

    def pulled(request):
        # The whole one comes while the other is waited for.
        there = [replies.pop(name) for name in request.message_ids if name in replies and (name == "first" or late())]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(reply) for reply in there],
            message_object_trees=[get_object_tree(reply) for reply in there],
        )

    def late():
        return time.monotonic() > began + 0.3

    def part_of(request):
        content = parts.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content or b""
        )

    grid = HttpGrid(token="x")
    grid._run = SimpleNamespace(run_id=1)
    grid._client = SimpleNamespace(
        PushMessages=lambda request: PushAppMessagesResponse(message_ids=["first", "second"]),
        PushObject=None,
        PullMessages=pulled,
        PullObject=part_of,
        ConfirmMessageReceived=lambda request: None,
    )
    requests = {client: OutgoingRequest(1001 + client, "query", RecordDict()) for client in (0, 1)}
    outcome = exchange(grid, requests, 1.0, "", lambda client, content: "heard")
    assert time.monotonic() - began < 10, "Flower waits for up to two hours"
    assert outcome.replies == {1: "heard"}
    assert outcome.faults == {0: "did not send its whole reply within the life of the message"}


def test_a_server_that_is_gone_is_no_fault_of_a_client(tmp_path):
    def gone(names):
        raise ConnectionError("the SuperLink is gone")

    here = setting(tmp_path)
    here.grid.pull_messages = gone
    engine = here.engine()
    with pytest.raises(ConnectionError):
        engine.roster.present()
    engine.close()


@exchanges
def test_an_answer_that_comes_twice_counts_once(exchange, tmp_path):
    here = setting(tmp_path)
    times = trouble(here, sampled(here, ROUND)[1], ROUND, exchange, lambda r, d: [d(r), d(r)])
    said: list[str] = []
    state, engine = flower_state(here, report=said.append)
    assert times
    assert is_as_without(state, here)
    assert not engine.dropped
    assert any("nobody asked for" in line for line in said)


@exchanges
def test_an_answer_that_comes_late_is_never_used(exchange, tmp_path):
    """It comes with the replies to the next exchange."""
    here = setting(tmp_path)
    drawn = sampled(here, ROUND)
    late: list[Message] = []

    def transport(node, request, deliver):
        header = header_of(request.content)
        if (header["client"], header["round"], header["exchange"]) == (drawn[1], ROUND, exchange):
            late.append(deliver(request))
            return []
        replies = [deliver(request)]
        if late and (header["round"], header["exchange"]) != (ROUND, exchange):
            replies.append(late.pop())
        return replies

    here.grid.transport = transport
    state, engine = flower_state(here)
    assert not late
    assert is_as_without(state, here, {ROUND: {drawn[1]}})
    assert "did not answer within" in engine.dropped[0][2]


def test_two_clients_that_fail_in_different_exchanges_are_both_left_out(tmp_path):
    here = setting(tmp_path)
    drawn = sampled(here, ROUND)
    bad = {(drawn[0], 2), (drawn[2], 1)}

    def transport(node, request, deliver):
        header = header_of(request.content)
        if header["round"] == ROUND and (header["client"], header["exchange"]) in bad:
            return [Message(Error(8, ""), reply_to=request)]
        return [deliver(request)]

    here.grid.transport = transport
    state, engine = flower_state(here)
    assert is_as_without(state, here, {ROUND: {drawn[0], drawn[2]}})
    assert {name for _, name, _ in engine.dropped} == {f"client-{drawn[0]:03d}", f"client-{drawn[2]:03d}"}


def test_half_of_the_clients_gone(tmp_path):
    here = setting(tmp_path)
    gone = set(range(3))
    here.grid.online -= {1000 + client for client in gone}
    state, engine = flower_state(here, terms=Terms(exchange_seconds=0.3, quorum=0.2, pause_seconds=0.01))
    assert is_as_without(state, here, dict.fromkeys(range(ROUNDS), gone))
    assert {reason for *_, reason in engine.dropped} == {"is not connected"}


def test_with_fewer_than_the_quorum_a_round_is_repeated_until_they_are_back(tmp_path):
    here = setting(tmp_path)
    expected = sha256(serial_state(here))
    everybody = set(here.grid.online)
    said: list[str] = []

    def report(sentence):
        said.append(sentence)
        if sum("the server tries again" in line for line in said) == 3:
            here.grid.online |= everybody

    engine = here.engine(report=report)
    state = engine.advance(engine.start(), 0, 1)
    here.grid.online.clear()  # all of them, then all back
    state = engine.advance(state, 1, ROUNDS - 1)
    engine.close()
    assert sha256(state) == expected
    assert sum("0 of 4 clients left, but 2 are needed; the server tries again" in line for line in said) == 3


def test_a_round_that_cannot_be_done_ends_the_run_and_fakes_nothing(tmp_path):
    here = setting(tmp_path)
    engine = here.engine(terms=Terms(exchange_seconds=0.1, pause_seconds=0.01, patience_seconds=0.1))
    state = engine.start()
    here.grid.online.clear()
    with pytest.raises(PefllError, match="PEFLL-F436"):
        engine.advance(state, 0, 1)
    engine.close()


def test_a_round_is_given_up_at_its_deadline(tmp_path):
    import time

    here = setting(tmp_path)
    terms = Terms(exchange_seconds=60, round_seconds=0.2, pause_seconds=0.01, patience_seconds=0.5)
    said: list[str] = []
    engine = here.engine(terms=QUICK, report=said.append)
    state = engine.start()
    here.grid.transport = lambda node, request, deliver: []
    engine.terms = terms
    began = time.monotonic()
    with pytest.raises(PefllError, match="PEFLL-F436"):
        engine.advance(state, 0, 1)
    engine.close()
    assert time.monotonic() - began < 30, "an exchange waited for its own 60 s and not for the round's end"


def test_the_first_client_fails_before_the_first_round(tmp_path):
    here = setting(tmp_path)
    first, second = sampled(here, 0)[:2]
    times = trouble(here, first, 0, 0, lambda r, d: [Message(Error(8, ""), reply_to=r)])
    engine = here.engine()
    state = engine.start()
    engine.close()
    from tests.engines.flower.federations import PER_ROUND, SEED, WithoutSome

    serial = WithoutSome(here.federation, here.agreement.build(), SEED, PER_ROUND)
    serial.absent = {0: {first}}
    expected = serial.start()
    serial.close()
    assert times
    assert sha256(state) == sha256(expected)
    del second


def test_in_an_evaluation_a_client_that_fails_is_left_out_of_the_mean(tmp_path):
    import numpy as np

    from pefll.data.samples import TEST
    from pefll.training.evaluation import client_scores

    here = setting(tmp_path)
    state, _ = flower_state(here)
    engine = here.engine()
    everybody = np.arange(6)
    whole = client_scores(engine, engine.method, state, everybody, TEST)
    for act in ("describe_all", "predict"):

        def transport(node, request, deliver, act=act):
            bad = node == 1002 and request.metadata.message_type.endswith(act)
            return [Message(Error(8, ""), reply_to=request)] if bad else [deliver(request)]

        here.grid.transport = transport
        part = client_scores(engine, engine.method, state, everybody, TEST)
        assert (part[2] == 0).all()
        assert (np.delete(part, 2, axis=0) == np.delete(whole, 2, axis=0)).all()
    engine.close()


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ({"1": torch.tensor(1e6)}, "correct among"),
        ({"1": torch.tensor(-3.0)}, "-3 correct, which is not a count"),
        ({"0": torch.tensor(2.5)}, "2.5 samples, which is not a count"),
        ({"0": torch.tensor(1e6), "1": torch.tensor(1e6)}, "1e+06 samples, but said that it has"),
    ],
)
def test_in_an_evaluation_a_score_that_cannot_be_is_left_out_of_the_mean(forged, reason, tmp_path):
    import numpy as np

    from pefll.data.samples import TEST
    from pefll.training.evaluation import client_scores

    here = setting(tmp_path)
    said: list[str] = []
    engine = here.engine(report=said.append)
    state = engine.start()
    everybody = np.arange(6)
    whole = client_scores(engine, engine.method, state, everybody, TEST)

    def transport(node, request, deliver):
        if node == 1002 and request.metadata.message_type == "evaluate.predict":
            return changed(request, deliver, lambda header, tensors: (header, tensors | forged))
        return [deliver(request)]

    here.grid.transport = transport
    part = client_scores(engine, engine.method, state, everybody, TEST)
    engine.close()
    assert whole[2, 0] > 0
    assert (part[2] == 0).all()
    assert (np.delete(part, 2, axis=0) == np.delete(whole, 2, axis=0)).all()
    (sentence,) = said
    assert sentence.startswith("evaluation: client-002 sent a score")
    assert reason in sentence


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "pfedme", "pfedhn"])
def test_other_methods_go_on_without_an_offender_too(method, tmp_path):
    from pefll.core.tree import leaves

    here = setting(tmp_path, method)
    offender = sampled(here, ROUND)[2]
    expected = serial_state(here, {ROUND: {offender}})
    trouble(here, offender, ROUND, 0, FAULTS["NaN"][0])
    state, _ = flower_state(here)
    for wanted, found in zip(leaves(expected), leaves(state), strict=True):
        if method in ("fedrep", "pfedme") and wanted.dim() == 2:
            found = torch.stack([here.kept(client, row) for client, row in enumerate(found)])
        assert torch.equal(found, wanted)


def test_strangers_and_doubles_are_left_out(tmp_path):
    here = setting(tmp_path)
    expected = sha256(serial_state(here))
    for node, name in ((2000, "nobody-knows-me"), (2001, "client-001")):
        config = here.grid.contexts[1001].node_config | {"name": name}
        here.grid.contexts[node] = type(here.grid.contexts[1001])(
            1, node, config, type(here.grid.contexts[1001].state)(), here.grid.contexts[1001].run_config
        )
        here.grid.online.add(node)
    said: list[str] = []
    state, _ = flower_state(here, report=said.append)
    assert sha256(state) == expected
    assert any("nobody-knows-me" in line for line in said)
    assert any("a second node calls itself client-001" in line for line in said)


def test_a_clients_key_says_who_it_is(tmp_path):
    here = setting(tmp_path)
    expected = sha256(serial_state(here))
    here.grid.keys = {node: context.node_config["name"] for node, context in here.grid.contexts.items()}
    # With a key of its own it is admitted, and as it has the lowest number it is asked before the client that it plays.
    honest = here.grid.contexts[1001]
    here.grid.contexts[900] = type(honest)(1, 900, honest.node_config, type(honest.state)(), honest.run_config)
    here.grid.keys[900] = "client-004"
    here.grid.online.add(900)
    said: list[str] = []
    state, _ = flower_state(here, report=said.append)
    assert sha256(state) == expected
    assert "a node with the key of client-004 calls itself 'client-001'; it is left out" in said


def test_two_nodes_with_keys_of_one_name_are_both_left_out(tmp_path):
    here = setting(tmp_path)
    here.grid.keys = {node: context.node_config["name"] for node, context in here.grid.contexts.items()}
    honest = here.grid.contexts[1001]
    here.grid.contexts[900] = type(honest)(1, 900, honest.node_config, type(honest.state)(), honest.run_config)
    here.grid.keys[900] = "client-001"  # a second key was registered under the name
    here.grid.online.add(900)
    said: list[str] = []
    engine = here.engine(report=said.append)
    assert engine.roster.present() == [0, 2, 3, 4, 5]
    assert engine.roster.present() == [0, 2, 3, 4, 5]
    engine.close()
    assert [line for line in said if "2 nodes have keys with the name client-001" in line] == said


def test_a_client_with_other_settings_is_told_apart(tmp_path):
    here = setting(tmp_path)
    here.grid.contexts[1001].run_config["seed"] = 77
    said: list[str] = []
    engine = here.engine(report=said.append)
    assert engine.roster.present() == [0, 2, 3, 4, 5]
    engine.close()
    assert any("set up for another agreement" in line for line in said)


def test_what_is_wrong_with_a_clients_data_stays_on_its_machine(tmp_path, caplog):
    import numpy as np

    here = setting(tmp_path)
    np.savez(tmp_path / "client-001.npz", x=np.zeros((2, 6), dtype=np.float32), y=np.array([0, 77]))
    said: list[str] = []
    engine = here.engine(report=said.append)
    assert 1 not in engine.roster.present()
    engine.close()
    assert any("its own log says why" in line for line in said)
    assert not any("77" in line for line in said)
