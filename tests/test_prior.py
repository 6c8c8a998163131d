"""A run whose first rounds have only some of the seen clients keeps the state after them as a prior."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.engines.round_plan import PriorPhase, RoundPlan, by_samples, uniformly
from pefll.training.callbacks import Callback
from tests.federations import flat, ragged

SMALL = {
    "clients_per_round": 2,
    "local_steps": 2,
    "hypernetwork": "S",
    "eval_every": 4,
    "processes": 1,
    "device": "cpu",
}
PRIOR = SMALL | {"prior_clients": 0.5, "prior_rounds": 3, "checkpoint_every": 100}


class StopAt(Callback):
    """Stops a run with an error, as a crash does, but after a checkpoint."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_rounds(self, run):
        if run.round >= self.round:
            raise RuntimeError("stop")


def seen_at(federation, **settings):
    """Return the clients of each round, as a user's sampling sees them."""
    plan = RoundPlan(sampling=settings.get("sampling", uniformly), prior=PriorPhase(0.5, 4))
    samples = federation.count[0, : federation.num_seen].numpy()
    return [plan.clients(7, t, samples, 2).tolist() for t in range(200)]


@pytest.mark.parametrize("sampling", [uniformly, by_samples])
def test_only_the_clients_of_the_prior_are_in_the_first_rounds(sampling):
    federation = ragged(clients=12)
    members = PriorPhase(0.5, 4).clients(7, 10)
    assert len(members) == 5 == len(set(members.tolist()))
    rounds = seen_at(federation, sampling=sampling)
    assert all(set(clients) <= set(members.tolist()) for clients in rounds[:4])
    assert {client for clients in rounds[4:] for client in clients} == set(range(10))
    assert PriorPhase(0.5, 4).clients(8, 10).tolist() != members.tolist()


def changed(federation, clients):
    """Return a federation in which the samples of some clients are others."""
    x = federation.x.clone()
    for client in clients:
        for split in range(3):
            x[federation.indices(client, split)] += 3.0
    return dataclasses.replace(federation, x=x)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_the_prior_does_not_depend_on_the_other_clients(engine):
    federation = ragged(clients=12)
    members = PriorPhase(0.5, 3).clients(0, 10)
    others = np.setdiff1d(np.arange(10), members)
    first = pefll.fit(federation, "pefll", rounds=6, engine=engine, **PRIOR)
    same, other = (
        pefll.fit(changed(federation, clients), "pefll", rounds=6, engine=engine, **PRIOR)
        for clients in (others, members)
    )
    assert torch.equal(flat(first.prior), flat(same.prior))  # with the numbers that standardise descriptors
    assert not torch.equal(flat(first.prior), flat(other.prior))
    assert not torch.equal(flat(first.final), flat(same.final))
    assert int(first.prior.step) == 3
    assert pefll.fit(federation, "pefll", rounds=6, engine=engine, **SMALL).prior is None


@pytest.mark.parametrize("stop", [2, 3, 5])
@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_a_resumed_run_has_the_same_bits(tmp_path, stop, engine):
    federation = ragged(clients=12)
    whole = pefll.fit(federation, "pefll", rounds=8, engine=engine, out=tmp_path / "whole", **PRIOR)
    with pytest.raises(PefllError):
        pefll.fit(federation, "pefll", rounds=8, engine=engine, out=tmp_path / "cut", callbacks=[StopAt(stop)], **PRIOR)
    cut = pefll.fit(federation, "pefll", rounds=8, engine=engine, out=tmp_path / "cut", **PRIOR)
    for name in ("prior", "final", "server"):
        assert torch.equal(flat(getattr(whole, name)), flat(getattr(cut, name)))
    loaded = pefll.load(tmp_path / "cut")
    assert torch.equal(flat(loaded.prior), flat(whole.prior))
    again = pefll.fit(federation, "pefll", rounds=8, engine=engine, out=tmp_path / "cut", **PRIOR)  # finished already
    assert torch.equal(flat(again.prior), flat(whole.prior))


def test_half_of_the_rounds_stay_half_of_the_first_number_when_a_run_is_extended(tmp_path):
    federation = ragged(clients=12)
    settings = SMALL | {"prior_clients": 0.5}
    short = pefll.fit(federation, "pefll", rounds=4, out=tmp_path / "run", **settings)
    assert short.config.prior_rounds == 2
    longer = pefll.fit(federation, "pefll", rounds=8, out=tmp_path / "run", **settings)
    assert longer.config.prior_rounds == 2
    assert torch.equal(flat(longer.prior), flat(short.prior))


def test_a_prior_that_nothing_could_use_is_refused_before_training():
    """Theorems about error rates of PeFLL use the prior; other methods and tasks have none."""
    federation, settings = ragged(clients=12), {"prior_clients": 0.5, "rounds": 6, "clients_per_round": 2}

    def stopped(run):
        raise AssertionError("training began")

    watch = type("Watch", (Callback,), {"on_start": lambda self, run: stopped(run)})()
    with pytest.raises(PefllError, match=r"pefll, pefll-prior and pefll-plus, which fedavg cannot use; leave it out"):
        pefll.fit(federation, "fedavg", callbacks=[watch], **settings)
    with pytest.raises(PefllError) as wrong:
        pefll.fit(federation, "fedavg", callbacks=[watch], **settings)
    assert wrong.value.code == "PEFLL-T214"
    x = np.random.default_rng(0).normal(size=(240, 3))
    numbers = pefll.federation_from_arrays(x, x.sum(1), np.repeat(np.arange(12), 20))
    with pytest.raises(PefllError, match="the task Regression does not have") as wrong:
        pefll.fit(numbers, "pefll", task=pefll.Regression(), callbacks=[watch], **settings)
    assert wrong.value.code == "PEFLL-T215"
    for name in ("pefll-prior", "pefll-plus", f"{__name__}:OwnPeFLL"):
        small = {name: value for name, value in SMALL.items() if name not in ("hypernetwork", "clients_per_round")}
        assert pefll.fit(federation, name, **small, **settings).prior is not None


@dataclasses.dataclass(frozen=True)
class OwnPeFLL(pefll.PeFLL):
    """A user's variation of PeFLL, which has the same bounds."""


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"prior_rounds": 3}, "PEFLL-T210"),
        ({"prior_clients": 0.5, "prior_rounds": 6}, "PEFLL-T211"),
        ({"prior_clients": 0.1}, "PEFLL-T212"),  # one client, but rounds have two
        ({"prior_clients": 0.99}, "PEFLL-T212"),  # nobody is left
        ({"prior_clients": 1.5}, "PEFLL-A007"),
    ],
)
def test_a_prior_that_cannot_be_made(settings, code):
    with pytest.raises(PefllError) as wrong:
        pefll.fit(ragged(clients=12), "pefll", rounds=6, **SMALL, **settings)
    assert wrong.value.code == code
