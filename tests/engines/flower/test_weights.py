"""What a client declares about itself does not let it outweigh the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")


from pefll.core.errors import PefllError
from pefll.deploy import server_app
from pefll.deploy.demo import agreement_of, digits
from pefll.deploy.plan import Plan
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.inprocess import InProcessGrid, write_client
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.terms import Terms
from pefll.engines.flower.server.weights import WeightLimits
from tests.deploy.test_server_app import plan_of
from tests.engines.flower.federations import (
    QUICK,
    Setting,
    changed,
    flower_state,
    is_as_without,
    sampled,
    setting,
    trouble,
)

HUGE = 1 << 39
NO_LIMITS = {"weight_limit": 0.0, "choice_limit": 0.0, "sample_limit": 0.0}


def claiming(header, _):
    """Return a client's hello with 2^39 samples in each split."""
    return header | {"counts": [HUGE] * 3}, {}


def liar(here, liars_best: int):
    """Let client 0 claim 2^39 samples, all of them right after one evaluation and none after the others."""
    scored = 0

    def transport(node, request, deliver):
        nonlocal scored
        kind = request.metadata.message_type if node == 1000 else ""
        if kind == "query.hello":
            return changed(request, deliver, claiming)
        if kind == "evaluate.predict":
            scored += 1
            right = HUGE if scored == liars_best else 0
            sums = {str(place): torch.tensor(float(value)) for place, value in enumerate((HUGE, right, 0, 0))}
            return changed(request, deliver, lambda header, _: (header, sums))
        return [deliver(request)]

    here.grid.transport = transport


def eight(folder):
    return setting(folder, clients=8, sizes=(9, 14, 11, 18))


def chosen(folder, **limits: float) -> int:
    """Train on digits with eight clients, one of which lies; return which round of 3, 6, 9 and 12 is the best."""
    folder.mkdir()
    federation = digits(8)
    agreed = agreement_of(federation)
    names = tuple(client_name(number) for number in range(8))
    nodes = {}
    for number, name in enumerate(names):
        write_client(federation, number, folder / f"{name}.npz")
        nodes[1000 + number] = {"name": name, "data": str(folder / f"{name}.npz")}
    here = Setting(federation, agreed, InProcessGrid(PefllClientApp(), nodes, agreed.to_config()), folder)
    liar(here, liars_best=1)
    plan = Plan(agreed, names, rounds=12, clients_per_round=8, eval_every=3, terms=dataclasses.replace(QUICK, **limits))
    return server_app.train(here.grid, plan).summary["best_round"]


def test_a_client_that_declares_half_a_trillion_samples_does_not_choose_the_best_round(tmp_path):
    assert chosen(tmp_path / "open", **NO_LIMITS) == 3, "the attack works where nothing limits it"
    assert chosen(tmp_path / "limited") > 6


def test_the_log_says_when_a_limit_acts_and_only_once(tmp_path):
    here = eight(tmp_path)
    liar(here, liars_best=1)
    said: list[str] = []
    engine = here.engine(report=said.append, clients_per_round=8)
    engine.roster.present()
    for _ in range(2):
        sums = engine.weighed(torch.arange(8).numpy(), _sums([HUGE, 4, 5, 6, 4, 5, 6, 5]), chooses=True)
    engine.close()
    assert sums[0].tolist() == [10, 10 * 2 / HUGE, 10 / HUGE, 10 * 3 / HUGE]
    assert sums[1:, 0].tolist() == [4, 5, 6, 4, 5, 6, 5]
    assert said[-1] == (
        "client-000 says that it has 549,755,813,888 samples; it counts for 10 in the choice of the best round"
    )
    assert len(said) == 4, "one for each split that it declares, and one here"
    assert engine.federation.count[:, 0].tolist() == [10 * m for m in (14, 5, 8)]


def _sums(samples):
    import numpy as np

    return np.array([[count, 2.0, 1.0, 3.0] for count in samples])


def test_a_mean_of_models_is_not_that_of_the_client_with_most_samples(tmp_path):
    """One declares 2^39 samples and sends a model that is far from the others'."""

    def attack(terms: Terms):
        here = setting(tmp_path, "fedavg", clients=8, sizes=(9, 14, 11, 18))

        def transport(node, request, deliver):
            kind = request.metadata.message_type if node == 1000 else ""
            if kind == "query.hello":
                return changed(request, deliver, claiming)
            if kind == "train.train":
                return changed(request, deliver, forging)
            return [deliver(request)]

        def forging(header, tensors):
            return header, {"0": torch.full_like(tensors["0"], 0.5), "1": torch.tensor(float(HUGE))}

        here.grid.transport = transport
        state, _ = flower_state(here, rounds=1, clients_per_round=8, terms=terms)
        return (state.theta - 0.5).abs().max()

    assert attack(dataclasses.replace(QUICK, **NO_LIMITS)) < 1e-6
    assert attack(dataclasses.replace(QUICK, weight_limit=1.0)) > 0.1


@pytest.mark.parametrize("samples", [0.0, -3.0, 2.5, 1e6], ids=["none", "negative", "a fraction", "more than declared"])
def test_an_update_whose_number_of_samples_cannot_be_is_left_out(samples, tmp_path):
    here = setting(tmp_path, "fedavg")
    offender = sampled(here, 1)[1]

    forged = {"1": torch.tensor(samples)}
    trouble(here, offender, 1, 0, lambda r, d: changed(r, d, lambda header, tensors: (header, tensors | forged)))
    state, engine = flower_state(here)
    assert is_as_without(state, here, {1: {offender}})
    assert "sent an update made from" in engine.dropped[0][2]


def test_limits():
    said: list[str] = []
    limits = WeightLimits(Terms(sample_limit=100), lambda client: f"c{client}", said.append)
    assert limits.limited({0: 5, 1: 500}, 10, "here") == {0: 5, 1: 50}, "of two, the smaller is the median"
    assert limits.limited({0: 40, 1: 500, 2: 50, 3: 0}, 10, "here") == {0: 40, 1: 100, 2: 50, 3: 0}
    assert limits.limited({0: 3, 1: 7, 2: 29}, 10, "here") == {0: 3, 1: 7, 2: 29}
    assert limits.limited({0: 0}, 10, "here") == {0: 0}
    for samples in range(1000, 1010):
        limits.limited({0: 5, 1: samples}, 10, "here")
    assert len(said) == 1, "a client is told of once, whatever it declares next"
    limits.limited({0: 5, 1: 500}, 10, "there")
    assert len(said) == 2
    open_ = WeightLimits(Terms(sample_limit=0), str, said.append)
    assert open_.limited({0: 1, 1: 1e15}, 0, "here") == {0: 1, 1: 1e15}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("weight_limit", 0.5, "PEFLL-P001"), ("choice_limit", -1.0, "PEFLL-P001"), ("sample_limit", 0.1, "PEFLL-P006")],
)
def test_limits_that_cannot_be_are_refused(name, value, code):
    with pytest.raises(PefllError) as caught:
        Terms(**{name: value})
    assert caught.value.code == code


def test_a_federation_of_before_the_limits_has_their_defaults(tmp_path):
    config = plan_of(setting(tmp_path), tmp_path).to_config()
    for name in ("weight-limit", "choice-limit", "sample-limit"):
        del config[name]
    assert Plan.from_config(config).terms == QUICK
