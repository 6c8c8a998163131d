"""PeFLL with a label prior: what it adds to PeFLL, and that it adds nothing without."""

from __future__ import annotations

import pytest
import torch

from pefll.core.errors import PefllError
from pefll.data.samples import TRAIN
from pefll.engines.vector import VectorEngine
from pefll.methods import typed_settings
from pefll.training.fitting import fit
from tests.federations import flat, ragged
from tests.methods.by_hand import both_engines, clients_of, models_of, opened

PRIOR = {"local_steps": 2, "batch_size": 4, "descriptor_size": 5, "hypernetwork": "S", "embedding": "mlp"}


@both_engines
def test_without_tau_it_is_pefll(make):
    states = []
    for name, settings in (("pefll-prior", {"tau": 0.0}), ("pefll", {})):
        engine = opened(make, name, PRIOR | settings)
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        engine.close()
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)


@both_engines
def test_the_prior_is_added_to_the_output_bias(make):
    federation = clients_of()
    models = {}
    for name, settings in (("pefll-prior", {"tau": 0.5, "epsilon": 0.01}), ("pefll", {})):
        engine = opened(make, name, PRIOR | settings, federation)
        models[name] = models_of(engine, engine.start())
        engine.close()
    histograms = torch.from_numpy(federation.histograms()).double()
    p = histograms / histograms.sum(1, keepdim=True)
    for client in range(4):
        difference = models["pefll-prior"][client] - models["pefll"][client]
        assert torch.equal(difference[:-3], torch.zeros(len(difference) - 3).double())
        torch.testing.assert_close(difference[-3:], 0.5 * (p[client] + 0.01).log(), rtol=0, atol=1e-10)


def test_histograms_are_counted_at_the_door():
    ledgers = []
    for name in ("pefll", "pefll-prior"):
        engine = opened(VectorEngine, name, PRIOR)
        engine.advance(engine.start(), 0, 1)
        ledgers.append(engine.ledger)
        engine.close()
    assert ledgers[1].up - ledgers[0].up == 8 * 3 * (3 + 1)  # from three clients, and one before the first round


@both_engines
def test_without_histograms_it_is_pefll_to_the_byte(make):
    states, ledgers = [], []
    for name, settings in (("pefll-prior", {"histogram": "false"}), ("pefll", {})):
        engine = opened(make, name, PRIOR | settings)
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        ledgers.append(vars(engine.ledger))
        engine.close()
    assert torch.equal(*states)
    assert ledgers[0] == ledgers[1]


def test_a_client_without_labels_has_equal_shares():
    federation = ragged(clients=8, sizes=(9,), seen=6)
    trained = fit(federation, "pefll-prior", rounds=2, processes=1, **PRIOR | {"embedding": "mlp-unlabeled"})
    x, y = (part[federation.indices(7, TRAIN)].numpy() for part in (federation.x, federation.y))
    told, untold = (trained.personalize(x, labels).network.state_dict() for labels in (y, None))
    *same, bias = told
    assert all(torch.equal(told[name], untold[name]) for name in same)
    p = torch.bincount(torch.from_numpy(y), minlength=3) / len(y)
    moved = (p + 1e-3).log() - torch.full((3,), 1 / 3 + 1e-3).log()
    torch.testing.assert_close(told[bias] - untold[bias], moved, rtol=0, atol=1e-5)


def test_settings_that_are_true_or_false():
    for words, wanted in ((("true", "yes", "1", True, 1), True), (("False", "no", "0", False, 0), False)):
        assert {typed_settings("pefll-prior", {"histogram": word})["histogram"] for word in words} == {wanted}
    with pytest.raises(PefllError, match=r"'perhaps'.*PEFLL-S002"):
        typed_settings("pefll-prior", {"histogram": "perhaps"})
