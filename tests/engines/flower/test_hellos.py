"""A node that does not say who it is: the server waits for it once, and the rounds go on without it."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Error, Message

from pefll.engines.flower.protocol.message import header_of
from pefll.engines.flower.protocol.names import HELLO
from pefll.engines.flower.server.terms import Terms
from tests.engines.flower.federations import ROUNDS, Setting, is_as_without, sampled, setting

SILENT = 1
ROUND_SECONDS = 23.0
OTHERS = [0, 2, 3, 4, 5]
TERMS = Terms(quorum=0.2)  # with the default deadline of 120 s


class Clock:
    """Time that passes only while this thread sleeps. Threads that other tests have left behind do not count."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.thread, self.real_sleep = threading.current_thread(), time.sleep

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is self.thread:
            self.now += seconds
        else:
            self.real_sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


class Hostile:
    """What a node does with each hello, and the times at which it was asked."""

    def __init__(self, here: Setting, clock: Clock, node: int = 1000 + SILENT) -> None:
        self.node, self.clock = node, clock
        self.act = lambda request, deliver: []  # it never answers
        self.asked: list[float] = []
        here.grid.transport = self

    def __call__(self, node, request, deliver):
        if node != self.node or header_of(request.content)["task"] != HELLO:
            return [deliver(request)]
        self.asked.append(self.clock.now)
        return self.act(request, deliver)


def test_a_node_that_never_says_who_it_is_holds_the_others_once(tmp_path, clock):
    here = setting(tmp_path)
    assert any(SILENT in sampled(here, t) for t in range(ROUNDS))
    silent = Hostile(here, clock)
    said: list[str] = []
    engine = here.engine(terms=TERMS, report=said.append)
    began = clock.now
    assert engine.roster.wait_for(len(OTHERS), 600) == OTHERS
    state = engine.start()
    for t in range(ROUNDS):
        state = engine.advance(state, t, 1)
        clock.now += ROUND_SECONDS
    engine.close()
    took = clock.now - began - ROUNDS * ROUND_SECONDS
    assert took == pytest.approx(TERMS.exchange_seconds), "the rounds waited for it again"
    assert len(silent.asked) == 2
    assert is_as_without(state, here, {t: {SILENT} for t in range(ROUNDS)})
    sentence = (
        f"node {silent.node}, asked who it is, did not answer within 120 s; "
        "it is asked again in 5 s, and the others do not wait for it"
    )
    assert [line for line in said if "asked who it is" in line] == [sentence]


def test_pauses_double_and_nobody_waits_in_them(tmp_path, clock):
    here = setting(tmp_path)
    here.grid.keys = {node: context.node_config["name"] for node, context in here.grid.contexts.items()}
    silent = Hostile(here, clock)
    said: list[str] = []
    engine = here.engine(terms=TERMS, report=said.append)
    engine.roster.present()
    waited = 0.0
    for _ in range(7200):
        clock.now += 1.0
        before = clock.now
        assert engine.roster.present() == OTHERS
        waited += clock.now - before
    engine.close()
    assert waited == 0
    gaps = [later - earlier for earlier, later in zip(silent.asked, silent.asked[1:], strict=False)]
    for gap, pause in zip(gaps, (5, 10, 20, 40, 80, 160, 320, 640, 640, 640), strict=False):
        assert TERMS.exchange_seconds + pause <= gap <= TERMS.exchange_seconds + pause + 2
    assert len(gaps) > 8
    assert all(line.startswith("the node with the key of client-001, asked who it is, did not") for line in said)
    assert len(said) in (len(silent.asked), len(silent.asked) - 1)


def test_a_node_that_was_only_slow_comes_back(tmp_path, clock):
    here = setting(tmp_path)
    slow = Hostile(here, clock)
    late: list[Message] = []
    engine = here.engine(terms=TERMS)
    assert engine.roster.present() == OTHERS
    slow.act = lambda request, deliver: late.append(deliver(request)) or []
    clock.now += 6
    assert engine.roster.present() == OTHERS
    (reply,) = late
    before = clock.now
    here.grid._replies[reply.metadata.reply_to_message_id] = late
    clock.now += 30
    assert engine.roster.present() == [0, 1, 2, 3, 4, 5], "the reply came between two rounds"
    # A node that has made the others wait cannot do so again by leaving and coming back.
    slow.act = lambda request, deliver: []
    here.grid.online.remove(slow.node)
    assert engine.roster.present() == OTHERS
    here.grid.online.add(slow.node)
    assert engine.roster.present() == OTHERS
    assert clock.now - before == 30
    assert len(slow.asked) == 3
    engine.close()


def test_a_client_that_was_refused_and_is_restarted_is_asked_at_once(tmp_path, clock):
    here = setting(tmp_path)
    run_config = here.grid.contexts[1000 + SILENT].run_config
    seed, run_config["seed"] = run_config["seed"], 77
    node = Hostile(here, clock)
    node.act = lambda request, deliver: [deliver(request)]
    said: list[str] = []
    engine = here.engine(terms=TERMS, report=said.append)
    for _ in range(4):
        assert engine.roster.present() == OTHERS
    assert len(said) == len(node.asked) == 1
    here.grid.online.remove(node.node)
    assert engine.roster.present() == OTHERS
    run_config["seed"] = seed
    here.grid.online.add(node.node)
    assert engine.roster.present() == [0, 1, 2, 3, 4, 5]
    engine.close()


@pytest.mark.parametrize("seconds", [1, 119])
def test_a_node_that_fails_after_a_while_is_not_waited_for_again_either(seconds, tmp_path, clock):
    here = setting(tmp_path)
    node = Hostile(here, clock)

    def fails(request, deliver):
        clock.now += seconds if len(node.asked) == 1 else 0  # the in-process grid answers while a message is sent
        return [Message(Error(2, ""), reply_to=request)]

    node.act = fails
    engine = here.engine(terms=TERMS)
    for _ in range(5):
        assert engine.roster.present() == OTHERS
    engine.close()
    assert len(node.asked) == 1


def test_a_late_reply_that_flower_cannot_read_is_its_senders_fault(tmp_path, clock):
    here = setting(tmp_path)
    node = Hostile(here, clock)
    said: list[str] = []
    engine = here.engine(terms=TERMS, report=said.append)
    engine.roster.present()
    broken: set[str] = set()
    node.act = lambda request, deliver: broken.add(request.metadata.message_id) or []
    pull = here.grid.pull_messages

    def stumbling(names):
        names = list(names)
        if broken & set(names):
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return pull(names)

    here.grid.pull_messages = stumbling
    clock.now += 6
    assert engine.roster.present() == OTHERS
    assert engine.roster.present() == OTHERS
    engine.close()
    assert len(said) == 2
    assert "sent a reply that Flower cannot read (UnicodeDecodeError); it is asked again in 10 s" in said[1]
