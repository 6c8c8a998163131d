"""What a new client pays, against counts by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pefll.core.errors import PefllError
from pefll.methods import FedAvg, Local, PeFLL
from pefll.methods.contract import ClientState, everyone
from pefll.training.cost import cost_of_median_client
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
    cost = cost_of_median_client(FedAvg().bind(linear(federation)), federation)
    assert cost[:4] == (1, 4 * WEIGHTS, 0, 0)
    assert cost.samples == 40  # of the client in the middle


def test_local_has_no_server_and_trains(federation):
    cost = cost_of_median_client(Local(epochs=5, batch_size=16).bind(linear(federation)), federation)
    assert (cost.exchanges, cost.bytes_down, cost.bytes_up) == (0, 0, 0)
    steps = 5 * 3  # 40 samples are three batches of 16
    forward = 2 * 16 * FEATURES * CLASSES
    assert cost.flops == steps * 2 * forward  # and once more for the weights' gradient; inputs need none
    assert cost.seconds > 0


def test_pefll_pays_an_embedding_network_down_a_descriptor_up_and_a_model_down(federation):
    method = PeFLL(embedding="linear", descriptor_size=5).bind(linear(federation))
    cost = cost_of_median_client(method, federation)
    embedder = CLASSES * 5 + 5
    assert cost.exchanges == 2
    assert cost.bytes_down == 4 * (embedder + WEIGHTS)
    assert cost.bytes_up == 4 * 5
    # The hypernetwork's work is the server's.
    assert 2 * 40 * CLASSES * 5 <= cost.flops <= 2 * 64 * CLASSES * 5 + 2 * 64 * 5


def test_weights_do_not_matter_and_neither_do_other_clients(federation):
    method = PeFLL(embedding="linear", descriptor_size=5).bind(linear(federation))
    one, other = (cost_of_median_client(method, federation, seed) for seed in (0, 1))
    assert one._replace(seconds=0) == other._replace(seconds=0)


@dataclass(frozen=True)
class FineTuned(FedAvg):
    """Sends the global model once, and the client goes on with it alone."""

    def personalize(self, server, cohort) -> Tensor:
        return cohort.run(self.fine_tune, everyone(server.theta)).value

    def fine_tune(self, client, theta):
        return ClientState(self.train(client, theta).theta)


class ByTheServer(FineTuned):
    """The client sends its model up, and the server makes another of it."""

    def personalize(self, server, cohort) -> Tensor:
        return 2 * cohort.run(self.train, everyone(server.theta)).theta


@pytest.mark.parametrize(
    ("kind", "exchanges", "models_down", "floats_up"),
    [(FineTuned, 1, 1, 0), (ByTheServer, 2, 2, WEIGHTS + 1)],  # how many samples it has goes up too
)
def test_what_a_client_keeps_is_not_sent(federation, kind, exchanges, models_down, floats_up):
    cost = cost_of_median_client(kind(local_steps=2).bind(linear(federation)), federation)
    assert cost[:3] == (exchanges, 4 * WEIGHTS * models_down, 4 * floats_up)


def test_without_unseen_clients_there_is_nothing_to_count():
    everybody = ragged(seen=8)
    with pytest.raises(PefllError, match="PEFLL-T101"):
        cost_of_median_client(FedAvg().bind(problem_of(everybody)), everybody)


def test_torch_is_left_as_it_was(federation):
    threads = torch.get_num_threads()
    cost_of_median_client(FedAvg().bind(linear(federation)), federation)
    assert torch.get_num_threads() == threads
