"""What a new client pays, against counts by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from pefll.cost import cost_of_new_client
from pefll.errors import PefllError
from pefll.methods import FedAvg, Local, PeFLL
from pefll.methods.contract import everyone
from tests.federations import problem_of, ragged

FEATURES, CLASSES = 6, 3
WEIGHTS = FEATURES * CLASSES + CLASSES
SIZES = (7, 7, 7, 7, 7, 7, 2, 40, 70)  # the three unseen clients have 2, 40 and 70 training samples


@pytest.fixture
def federation():
    return ragged(clients=9, shape=(FEATURES,), classes=CLASSES, sizes=SIZES, seen=6)


def linear(federation):
    return problem_of(federation, nn.Linear(FEATURES, CLASSES))


def test_fedavg_hands_the_global_model_out(federation):
    cost = cost_of_new_client(FedAvg(linear(federation)), federation)
    assert cost[:4] == (1, 4 * WEIGHTS, 0, 0)
    assert cost.samples == 40  # of the client in the middle


def test_local_has_no_server_and_trains(federation):
    cost = cost_of_new_client(Local(linear(federation), epochs=5, batch_size=16), federation)
    assert (cost.exchanges, cost.bytes_down, cost.bytes_up) == (0, 0, 0)
    steps = 5 * 3  # 40 samples are three batches of 16
    forward = 2 * 16 * FEATURES * CLASSES
    assert cost.flops == steps * 2 * forward  # and once more for the weights' gradient; inputs need none
    assert cost.seconds > 0


def test_pefll_pays_an_embedding_network_down_a_descriptor_up_and_a_model_down(federation):
    method = PeFLL(linear(federation), embedding="linear", descriptor_size=5)
    cost = cost_of_new_client(method, federation)
    embedder = CLASSES * 5 + 5
    assert cost.exchanges == 2
    assert cost.bytes_down == 4 * (embedder + WEIGHTS)
    assert cost.bytes_up == 4 * 5
    # The hypernetwork's work is the server's.
    assert 2 * 40 * CLASSES * 5 <= cost.flops <= 2 * 64 * CLASSES * 5 + 2 * 64 * 5


def test_weights_do_not_matter_and_neither_do_other_clients(federation):
    method = PeFLL(linear(federation), embedding="linear", descriptor_size=5)
    one, other = (cost_of_new_client(method, federation, seed) for seed in (0, 1))
    assert one._replace(seconds=0) == other._replace(seconds=0)


@dataclass(frozen=True)
class FineTuned(FedAvg):
    """Sends the global model once, and the client goes on with it alone: or does not, or sends it back."""

    trains_in_rounds: ClassVar[bool] = True

    def personalize(self, server, cohort) -> Tensor:
        return cohort.run(self.train, everyone(server.theta)).theta


class Frozen(FineTuned):
    def personalize(self, server, cohort) -> Tensor:
        cohort.run(self.train, everyone(server.theta))
        return server.theta.expand(cohort.size, -1)


class Server(FineTuned):
    def personalize(self, server, cohort) -> Tensor:
        return torch.zeros_like(cohort.run(self.train, everyone(server.theta)).theta)


@pytest.mark.parametrize(
    ("kind", "exchanges", "models_down", "models_up"),
    [
        (FineTuned, 1, 1, 0),  # the client keeps what it made
        (Frozen, 1, 1, 1),  # the client has it already
        (Server, 2, 2, 1),  # the server makes something new of it
    ],
)
def test_a_model_that_is_where_it_is_needed_is_not_sent(federation, kind, exchanges, models_down, models_up):
    cost = cost_of_new_client(kind(linear(federation), local_steps=2), federation)
    count = 4  # how many samples a client has goes up too
    assert cost[:3] == (exchanges, 4 * WEIGHTS * models_down, 4 * WEIGHTS * models_up + count)


def test_without_unseen_clients_there_is_nothing_to_count():
    everybody = ragged(seen=8)
    with pytest.raises(PefllError, match="no unseen clients"):
        cost_of_new_client(FedAvg(problem_of(everybody)), everybody)


def test_torch_is_left_as_it_was(federation):
    threads = torch.get_num_threads()
    cost_of_new_client(FedAvg(linear(federation)), federation)
    assert torch.get_num_threads() == threads
