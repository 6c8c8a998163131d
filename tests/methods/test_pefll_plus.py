"""PeFLL+: the parts that it is made of, each against its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pefll.core.errors import PefllError
from pefll.engines.serial import SerialEngine
from pefll.methods import PeFLLPlus, PeFLLPrior, build_method
from pefll.methods.contract import Problem
from pefll.models import CharLSTM, Network
from pefll.models.embedding import ConvEmbedding, LinearEmbedding, MLPEmbedding, build_embedding
from tests.federations import flat, problem_of, ragged
from tests.methods.by_hand import both_engines, clients_of, models_of, opened

SMALL = {"local_steps": 2, "batch_size": 4, "descriptor_size": 5, "hypernetwork": "S"}


@pytest.mark.parametrize("size", [2, 5, 26])
@pytest.mark.parametrize(
    ("shape", "kind"), [((3, 32, 32), ConvEmbedding), ((1, 8, 8), ConvEmbedding), ((6,), MLPEmbedding)]
)
def test_two_embeddings_are_their_parts(shape, kind, size):
    both = Network(build_embedding("two", shape, 7, size, tokens=False))
    of_sample = Network(kind(shape, 7, size // 2, labels=False))
    of_label = Network(LinearEmbedding(shape, 7, size - size // 2))
    assert both.size == of_sample.size + of_label.size
    eta = both.init(0, "e").double()
    x, y = torch.randn(4, *shape).double(), torch.tensor([0, 1, 6, 1])
    first, second = torch.split(eta, [of_sample.size, of_label.size])
    wanted = torch.cat([of_sample(first, x, y), of_label(second, x, y)], dim=1)
    assert wanted.shape == (4, size)
    assert torch.equal(both(eta, x, y), wanted)


def test_a_descriptor_of_one_number_has_no_two_parts():
    with pytest.raises(PefllError, match="PEFLL-N035"):
        build_method("pefll-plus", problem_of(clients_of()), SMALL | {"descriptor_size": 1})
    few = ragged(clients=3, seen=2)
    assert build_method("pefll-plus", problem_of(few), {}).descriptor == 2
    assert build_method("pefll-plus", problem_of(ragged(clients=100, sizes=(2,))), {}).descriptor == 26


@both_engines
def test_it_is_the_prior_with_two_embeddings_a_mean_and_decay(make):
    """To the byte: a run of pefll-prior with these settings."""
    parts = {"embedding": "two", "server_average": 0.98, "lambda_theta": 5e-4, "tau": 1.0, "epsilon": 1e-3}
    states, models, ledgers = [], [], []
    for name, settings in (("pefll-plus", {}), ("pefll-prior", parts)):
        engine = opened(make, name, SMALL | settings)
        server = engine.advance(engine.start(), 0, 3)
        states.append(flat(server))
        made = models_of(engine, server)
        models.append(torch.stack([made[client] for client in sorted(made)]))
        ledgers.append(vars(engine.ledger))
        engine.close()
    assert torch.equal(*states)
    assert torch.equal(*models)
    assert ledgers[0] == ledgers[1]


def test_its_defaults():
    plus, prior = PeFLLPlus(), PeFLLPrior()
    differ = {name for name in vars(prior) if getattr(plus, name) != getattr(prior, name)}
    assert differ == {"hypernetwork", "server_average", "lambda_theta"}
    assert (plus.hypernetwork, plus.server_average, plus.lambda_theta, plus.tau) == ("L", 0.98, 5e-4, 1.0)
    assert plus.refine_steps == 0


def test_an_embedding_can_be_chosen():
    federation = clients_of()
    for name, kind in (("auto", "TwoEmbeddings"), ("linear", "LinearEmbedding"), ("mlp-unlabeled", "MLPEmbedding")):
        method = build_method("pefll-plus", problem_of(federation), SMALL | {"embedding": name})
        assert type(method.phi.module).__name__ == kind
    problem = Problem(Network(CharLSTM((5,), 7, embedding=3, hidden=4)), (5,), 7, 4, tokens=True)
    assert type(build_method("pefll-plus", problem, SMALL).phi.module).__name__ == "LinearEmbedding"


def test_both_halves_of_a_descriptor_are_learned():
    engine = opened(SerialEngine, "pefll-plus", SMALL | {"server_lr": 1e-2})
    server = engine.start()
    after = engine.advance(server, 0, 2)
    for name, part in engine.method.phi.unflatten(after.embedder - server.embedder).items():
        assert part.abs().max() > 1e-4, name
    ((_, cohort),) = engine.cohorts(np.array([3]))
    v = engine.method.descriptors(after, cohort)
    assert v.shape == (1, 5 + 3)
    torch.testing.assert_close(v[0, 5:].sum(), torch.ones((), dtype=torch.float64))
    engine.close()
