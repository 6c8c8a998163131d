"""The serial engine's worker processes: what goes wrong on a client is told, and nothing hangs or stays behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.engines.serial import SerialEngine
from pefll.methods import FedAvg
from pefll.methods.contract import each, everyone
from tests.engines.test_engines import FEATURES, small
from tests.federations import problem_of


@dataclass(frozen=True)
class Troubled(FedAvg):
    """FedAvg whose clients get into trouble."""

    trouble: str = ""

    def train(self, client, theta):
        if self.trouble == "killed" and int(client.id) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "exception" and int(client.id) == 1:
            raise ZeroDivisionError("client 1 divided by nothing")
        if self.trouble == "sentence" and int(client.id) == 1:
            raise PefllError("client 1 has something to say")
        return super().train(client, theta)


def troubled(trouble: str, processes: int) -> SerialEngine:
    federation = small(FEATURES)
    method = Troubled(local_steps=1, trouble=trouble).bind(problem_of(federation))
    return SerialEngine(federation, method, seed=0, clients_per_round=4, processes=processes)


def forget_coverage(processes) -> None:
    """Remove what killed processes had half written for coverage, which would complain about it."""
    for process in processes:
        for path in Path.cwd().glob(f".coverage.*pid{process.pid}.*"):
            path.unlink()


def gone(engine_processes) -> bool:
    return all(not process.is_alive() for process in engine_processes)


@pytest.mark.parametrize("processes", [2, 3])
def test_more_clients_than_processes_are_dealt_out_and_come_back_in_order(processes):
    engine = troubled("", processes)
    ((ids, cohort),) = engine.cohorts(np.array([0, 3, 1, 2, 0, 2, 1]))
    theta = torch.randn(7, engine.method.problem.model.size)
    here = engine.run_here(engine.method.predict, ids, 0, [each(theta)], {"split": 0})
    for ours, theirs in zip(cohort.run(engine.method.predict, each(theta), split=0), here, strict=True):
        assert torch.equal(ours, theirs)
    engine.close()


def test_replies_to_a_call_that_failed_are_not_taken_for_those_to_the_next():
    engine = troubled("sentence", 2)
    server = engine.start()
    with pytest.raises(PefllError, match="something to say"):
        engine.advance(server, 0, 1)
    asked = 0
    for ids, cohort in engine.cohorts(np.array([0, 2, 3, 4])):  # seen clients, then new ones
        reply = cohort.run(engine.method.predict, each(server.theta.expand(len(ids), -1)), split=0)
        assert reply.samples.tolist() == engine.federation.count[0, ids].tolist()
        asked += len(ids)
    assert asked == 4
    engine.close()


def test_a_worker_that_dies_at_work_gives_a_sentence_and_no_hang():
    engine = troubled("killed", 2)
    processes = engine.workers._processes
    started = time.monotonic()
    with pytest.raises(PefllError, match="PEFLL-E013"):
        engine.advance(engine.start(), 0, 1)
    engine.close()
    assert time.monotonic() - started < 20
    assert gone(processes)
    forget_coverage(processes)


@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_died_while_idle_gives_a_sentence(which):
    engine = troubled("", 2)
    processes = engine.workers._processes
    server = engine.advance(engine.start(), 0, 1)
    os.kill(processes[which].pid, signal.SIGKILL)
    processes[which].join(10)
    with pytest.raises(PefllError, match="PEFLL-E013"):
        engine.advance(server, 1, 1)
    engine.close()
    assert gone(processes)
    forget_coverage(processes)


@pytest.mark.parametrize(
    ("processes", "trouble", "kind", "text"),
    [
        (1, "exception", ZeroDivisionError, "client 1 divided by nothing"),
        (2, "exception", RuntimeError, "ZeroDivisionError: client 1 divided by nothing"),
        (1, "sentence", PefllError, "client 1 has something to say"),
        (2, "sentence", PefllError, "client 1 has something to say"),
    ],
)
def test_what_goes_wrong_on_a_client_is_told(processes, trouble, kind, text):
    engine = troubled(trouble, processes)
    with pytest.raises(kind, match=text):
        engine.advance(engine.start(), 0, 1)
    engine.close()


def test_workers_outlive_signals_to_the_whole_group_and_end_with_the_server():
    """Ctrl-C and SIGTERM of a batch system reach every process; the server alone decides when to stop."""
    engine = troubled("", 2)
    processes = engine.workers._processes
    server = engine.advance(engine.start(), 0, 1)  # so that they have set up their handlers
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    after = engine.advance(server, 1, 1)
    assert not torch.equal(after.theta, server.theta)
    engine.close()
    assert gone(processes)


def test_functions_that_are_not_the_methods_own_run_in_this_process():
    engine = troubled("", 2)
    ((_, cohort),) = engine.cohorts(np.arange(4))
    here = os.getpid()
    replies = cohort.run(lambda client, value: torch.tensor(os.getpid()) + 0 * value, everyone(torch.tensor(0)))
    assert replies.tolist() == [here] * 4
    engine.close()


def test_an_empty_cohort_is_refused():
    engine = troubled("", 1)
    with pytest.raises(PefllError, match="PEFLL-E011"):
        engine.run_here(engine.method.train, np.zeros(0, dtype=np.int64), 0, [], {})
    engine.close()
