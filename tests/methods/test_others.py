"""What all of the paper's other methods have in common; each has a file of its own for what it does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.core.tree import leaves
from pefll.data.samples import TEST
from pefll.engines.vector import VectorEngine
from pefll.methods import Problem, build_method
from pefll.methods.averaging import update
from pefll.models import Network, build_model
from pefll.training.evaluation import evaluate
from tests.federations import problem_of, ragged
from tests.methods.by_hand import clients_of, opened, two_layers
from tests.methods.test_fedrep import HEADS
from tests.methods.test_pfedme import ENVELOPE


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pfedme", r"1000000 clients.*485 GB.*PEFLL-S004"),
        ("pfedhn", r"\bembedding_size\b.*PEFLL-S004"),
        *((name, r"1000000 clients.*GB.*PEFLL-S004") for name in ("scaffold", "ditto", "apfl", "lg-fedavg")),
    ],
)
def test_a_state_that_fits_into_no_memory_gives_a_sentence(name, sentence):
    model = Network(build_model("lenet", (3, 32, 32), 10))
    assert build_method(name, Problem(model, (3, 32, 32), 10, 1000), {}).local_steps > 0
    with pytest.raises(PefllError, match=sentence):
        build_method(name, Problem(model, (3, 32, 32), 10, 1_000_000), {})


def test_clients_drop_in_and_out():
    """What a client keeps waits for it as it was, however many rounds go by without it."""
    few = {"batch_size": 8}
    for name, settings, kept in (
        ("fedrep", HEADS, "heads"),
        ("pfedme", ENVELOPE, "personal"),
        ("scaffold", few | {"local_steps": 1}, "variates"),
        ("ditto", few | {"global_steps": 1, "personal_steps": 1}, "personal"),
        ("apfl", few | {"mixed_steps": 1}, "own"),
        ("fedper", few | {"local_steps": 1}, "owns"),
        ("lg-fedavg", few | {"local_steps": 1}, "owns"),
    ):
        engine = opened(VectorEngine, name, settings, c=1)
        server = engine.start()
        for t in range(8):
            (who,) = engine._sample(torch.tensor(t)).tolist()
            after = engine.advance(server, t, 1)
            changed = (getattr(after, kept) != getattr(server, kept)).any(dim=1).nonzero().flatten().tolist()
            assert changed == [who]
            server = after
        engine.close()


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("per-fedavg", {"variant": "so"}, r"variant .*'so'.*PEFLL-A101"),
        ("per-fedavg", {"batch_size": 0}, "PEFLL-S013"),
        ("per-fedavg", {"variant": "hf", "difference": 0.0}, "PEFLL-S014"),
        ("fedrep", {"body_epochs": 0}, "PEFLL-S005"),
        ("pfedme", {"inner_steps": 0}, "PEFLL-S016"),
        ("pfedme", {"new_lr": -0.1}, "pfedme: new_lr .*PEFLL-A014"),
        ("knn-per", {"few_neighbours": 20}, "PEFLL-S006"),
        ("knn-per", {"max_weight": 1.5}, "PEFLL-S007"),
        ("pfedhn", {"local_steps": 0}, "PEFLL-S009"),
        ("pfedhn", {"hypernetwork": "XL"}, r"hypernetwork.*PEFLL-A101"),
        ("pefll-prior", {"epsilon": 0.0}, "PEFLL-S011"),
    ],
)
def test_settings_that_make_no_sense(name, settings, sentence):
    with pytest.raises(PefllError, match=sentence):
        build_method(name, problem_of(clients_of(), two_layers()), settings)


def test_training_helps():
    """Of three classes that overlap, every method tells more apart than chance does, for seen clients and new ones."""
    federation = ragged(clients=12, sizes=(40,), seen=10)
    settings = {
        "per-fedavg": {"client_lr": 0.05, "inner_lr": 0.05, "batch_size": 8},
        "fedrep": {"client_lr": 0.05, "batch_size": 8},
        "pfedme": {"client_lr": 0.02, "batch_size": 8},
        "knn-per": {"client_lr": 0.05, "local_steps": 10, "batch_size": 8},
        "pfedhn": {"client_lr": 0.05, "local_steps": 10, "batch_size": 8, "server_lr": 0.02},
        "pefll-prior": {"client_lr": 0.02, "local_steps": 10, "server_lr": 2e-3},
        "pefll-plus": {"client_lr": 0.02, "local_steps": 10, "server_lr": 2e-3},
    }
    for name, chosen in settings.items():
        method = build_method(name, problem_of(federation, "mlp"), chosen)
        engine = VectorEngine(federation, method, seed=0, clients_per_round=5)
        server = engine.advance(engine.start(), 0, 40)
        result = evaluate(engine, method, server, TEST)
        engine.close()
        assert result.seen.per_sample > 0.65, name
        assert result.unseen.per_sample > 0.65, name
        assert all(leaf.isfinite().all() for leaf in leaves(server))


def test_a_method_is_a_value():
    federation = clients_of()
    settings = {"rounds": 3, "clients_per_round": 2, "engine": "serial", "processes": 1, "model": two_layers()}
    by_value = pefll.fit(federation, pefll.FedAvg(local_steps=2, client_lr=0.02), **settings)
    by_name = pefll.fit(federation, "fedavg", local_steps=2, client_lr=0.02, **settings)
    assert torch.equal(by_value.final.theta, by_name.final.theta)
    assert by_value.config.settings == by_name.config.settings
    assert pefll.FedAvg(local_steps=2) == pefll.FedAvg(local_steps=2)
    with pytest.raises(PefllError, match="PEFLL-T128"):
        pefll.fit(federation, pefll.FedAvg(local_steps=2), local_steps=3, **settings)
    with pytest.raises(PefllError, match="PEFLL-S021"):
        _ = pefll.FedAvg().problem


@dataclass(frozen=True)
class Frozen(pefll.FedAvg):
    """One's own method, given as a value: nobody trains."""

    def train(self, client, theta):
        return update(client, theta)


def test_ones_own_method_is_a_value_too():
    run = pefll.fit(clients_of(), Frozen(), rounds=2, clients_per_round=2, model=two_layers(), engine="serial")
    assert run.config.method == f"{__name__}:Frozen"
    torch.testing.assert_close(run.final.theta, run.method.problem.model.init(0, "model"))
