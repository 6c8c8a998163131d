"""A function in a thread of its own that asks questions, and whoever answers them."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from pefll.engines.conversation import conversation, worker
from pefll.engines.settings import AT_WORK, ThreadSettings
from pefll.errors import PefllError


def test_a_conversation_asks_and_is_answered():
    where = []

    def add(ask):
        where.append(threading.get_ident())
        return ask("one") + ask("two")

    with worker() as thread:
        talk = conversation(add, thread)
        assert next(talk) == "one"
        assert talk.send(1) == "two"
        with pytest.raises(StopIteration) as end:
            talk.send(2)
    assert end.value.value == 3
    assert where != [threading.get_ident()]


def test_what_is_raised_in_a_conversation_is_raised_outside():
    def fails(ask):
        raise PefllError(f"no {ask(None)}")

    with worker() as thread:
        talk = conversation(fails, thread)
        next(talk)
        with pytest.raises(PefllError, match="no answer"):
            talk.send("answer")


def test_a_conversation_that_nobody_goes_on_with_ends():
    ended = []

    def stubborn(ask):
        for question in range(3):
            try:
                ask(question)
            finally:
                ended.append(question)

    with worker() as thread:
        talk = conversation(stubborn, thread)
        next(talk)
        talk.send(None)
        talk.close()
    assert ended == [0, 1]


def test_an_interrupt_in_the_middle_of_a_conversation_leaves_no_thread_behind():
    begun, threads = threading.Event(), threading.active_count()

    def slow(ask):
        begun.set()
        time.sleep(0.2)
        ask("who is still there?")

    def interrupt():
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def whole():
        with worker() as thread:
            threading.Thread(target=interrupt).start()
            next(conversation(slow, thread))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            whole()
    finally:
        signal.signal(signal.SIGINT, before)
    assert threading.active_count() == threads


def test_its_thread_has_the_settings_of_engines():
    before = ThreadSettings.now()

    def settings(ask):
        return ask(ThreadSettings.now())

    try:
        torch.set_flush_denormal(False)
        torch.set_num_threads(2)  # and what new threads begin with
        with worker() as thread:
            talk = conversation(settings, thread)
            found = next(talk)
            talk.close()
    finally:
        before.set()
    assert found == AT_WORK
