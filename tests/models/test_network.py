"""A module as a function of one flat vector, also a module that a user brings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pefll.core.errors import PefllError
from pefll.core.plugins import allow
from pefll.models import Network, build_model, check_model
from pefll.runs.personal import PersonalModel
from pefll.training.fitting import fit
from tests.federations import ragged
from tests.models import zoo


def test_flat_and_back():
    network = Network(build_model("lenet", (3, 16, 16), 4))
    flat = torch.randn(network.size)
    parts = network.unflatten(flat)
    assert list(parts) == [name for name, _ in network.module.named_parameters()]
    assert [part.shape for part in parts.values()] == network.shapes
    assert torch.equal(network.flatten(list(parts.values())), flat)
    assert all(part.data_ptr() >= flat.data_ptr() for part in parts.values())  # views, no copies


def test_the_function_is_the_module():
    network = Network(build_model("cnn", (2, 8, 8), 4))
    flat = network.init(5, "x")
    x = torch.randn(3, 2, 8, 8)
    network.module.load_state_dict(network.unflatten(flat))
    torch.testing.assert_close(network(flat, x), network.module(x), rtol=1e-5, atol=1e-6)
    other = network.init(6, "x")
    assert not torch.allclose(network(other, x), network.module(x), atol=1e-3)


def test_initial_weights_depend_on_seed_and_purpose_and_on_nothing_else():
    network = Network(build_model("mlp", (6,), 3))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = network.init(0, "model")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.rand(7)
    assert torch.equal(network.init(0, "model"), first)
    assert torch.equal(Network(build_model("mlp", (6,), 3)).init(0, "model"), first)
    assert not torch.equal(network.init(1, "model"), first)
    assert not torch.equal(network.init(0, "embedder"), first)
    assert first.dtype == torch.float32
    network.init(3, "model")
    assert torch.equal(network.init(0, "model"), first)


def test_initial_weights_are_what_torch_would_draw():
    layer = nn.Linear(400, 300)
    flat = Network(layer).init(0, "x")
    bound = 1 / 20
    assert float(flat.abs().max()) <= bound
    assert float(flat.std()) == pytest.approx(bound / 3**0.5, rel=0.02)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
)
def test_statistics_of_batches_are_refused(layer):
    with pytest.raises(PefllError, match="PEFLL-N028"):
        Network(nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3)))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.1), nn.AlphaDropout(0.1)])
def test_dropout_is_refused(layer):
    with pytest.raises(PefllError, match="PEFLL-N029"):
        Network(nn.Sequential(nn.Linear(6, 4), layer))


def test_dropout_of_nothing_and_norms_within_a_sample_are_fine():
    network = Network(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0), nn.GroupNorm(2, 4), nn.LayerNorm(4)))
    check_model(network, (6,), 4, tokens=False)


class Strange(nn.Linear):
    """A model whose forward pass does what no layer tells."""

    def __init__(self, what: str) -> None:
        super().__init__(6, 3)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        if self.what == "random":
            return z + torch.rand(())
        if self.what == "mixing":
            return z - z.mean(0)
        if self.what == "NaN":
            return z * torch.nan
        if self.what == "ruled out":
            return torch.cat([z[:, :2], torch.full_like(z[:, 2:], -torch.inf)], dim=1)
        if self.what == "logarithm":
            return super().forward(x.log())
        raise AssertionError("I am broken")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("random", "PEFLL-N011"),
        ("mixing", "PEFLL-N012"),
        ("NaN", r"the model Strange gives scores that are NaN .*PEFLL-N571"),
        ("broken", r"I am broken.*PEFLL-N005"),
    ],
)
def test_models_that_are_random_mix_samples_or_raise_are_refused(what, sentence):
    with pytest.raises(PefllError, match=sentence):
        check_model(Network(Strange(what)), (6,), 3, tokens=False)


@pytest.mark.parametrize("what", ["ruled out", "logarithm"])
def test_models_that_need_positive_values_or_rule_classes_out_are_fine(what):
    check_model(Network(Strange(what)), (6,), 3, tokens=False)


def test_building_and_fitting_leave_torchs_generator_alone():
    federation = ragged(clients=4, sizes=(9,))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fit(federation, "pefll", rounds=1, local_steps=1, processes=1)
    assert torch.equal(torch.rand(3), wanted)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(PefllError, match="PEFLL-N025"):
        Network(nn.Flatten())


def test_a_model_that_does_not_fit_the_data_is_refused():
    with pytest.raises(PefllError, match=r"model Linear .*\(5,\).*PEFLL-N005"):
        check_model(Network(nn.Linear(6, 3)), (5,), 3, tokens=False)
    with pytest.raises(PefllError, match=r"\(4,\).*\b3 classes.*PEFLL-N009"):
        check_model(Network(nn.Linear(6, 4)), (6,), 3, tokens=False)
    with pytest.raises(PefllError, match=r"tuple.*PEFLL-N008"):
        check_model(Network(zoo.a_pair((6,), 3)), (6,), 3, tokens=False)


def test_a_model_that_changes_its_own_buffers_is_refused():
    class Counter(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    with pytest.raises(PefllError, match=r"buffer 'calls'.*PEFLL-N006"):
        check_model(Network(Counter()), (6,), 3, tokens=False)


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("tests.models.nowhere:f", r"model 'tests.models.nowhere:f'.*PEFLL-A106"),
        ("tests.models.zoo:nothing", r"model .*\bnothing\b.*PEFLL-A108"),
        ("tests.models.unfit:f", r"ZeroDivisionError in .*unfit\.py, line 3: division by zero.*PEFLL-A107"),
        ("tests.models.zoo:no_module", r"a str.*PEFLL-N003"),
        ("tests.models.zoo:fails", r"KeyError in .*zoo\.py, line \d+: '\(6,\) 3'.*PEFLL-N002"),
        ("tests.models.zoo:made", r"\ba Linear.*PEFLL-N001"),
        (":f", r"the model.*PEFLL-A106"),
        ("PEFLL-N001", "PEFLL-N001"),
    ],
)
def test_import_paths_that_do_not_lead_to_a_model(reference, sentence):
    allow(reference)
    with pytest.raises(PefllError, match=sentence):
        build_model(reference, (6,), 3)


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", ["pefll", "fedavg"])
@pytest.mark.parametrize("make", [zoo.tied, zoo.normalised, zoo.keeping, zoo.flat])
def test_a_users_module_trains_personalises_and_travels(tmp_path, engine, method, make):
    federation = ragged(clients=6, sizes=(9, 20))
    module = make((6,), 3)
    settings = {"local_steps": 2, "rounds": 2, "clients_per_round": 3, "engine": engine, "processes": 1}
    run = fit(federation, method, model=module, out=tmp_path / "run", **settings)
    x, y = federation.x[:7].numpy(), federation.y[:7].numpy()
    model = run.personalize(x, y)
    scores = model.probabilities(x)
    assert scores.shape == (7, 3)
    np.testing.assert_allclose(scores.sum(1), 1, atol=1e-5)
    # The personal module computes what the method's flat vector does.
    theta = torch.cat([part.detach().reshape(-1) for part in model.network.parameters()])
    with torch.no_grad():
        wanted = run.method.problem.model(theta, federation.x[:7]).softmax(1)
    np.testing.assert_allclose(scores, wanted.numpy(), atol=1e-6)
    if method == "fedavg":
        torch.testing.assert_close(theta, run.server.theta.cpu(), rtol=0, atol=0)
    model.save(tmp_path / "me.safetensors")
    with pytest.raises(PefllError, match="PEFLL-M051"):
        PersonalModel.load(tmp_path / "me.safetensors")
    again = PersonalModel.load(tmp_path / "me.safetensors", make((6,), 3))
    np.testing.assert_array_equal(again.probabilities(x), scores)
    with pytest.raises(PefllError, match="PEFLL-M019"):
        PersonalModel.load(tmp_path / "me.safetensors", nn.Linear(6, 3))


def test_fitting_leaves_the_users_module_as_it_was():
    federation = ragged(clients=4, sizes=(9,))
    module = zoo.tied((6,), 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fit(federation, "fedavg", model=module, rounds=1, local_steps=1, processes=1)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", ["pefll", "fedavg", "fedrep", "knn-per", "pfedme"])
def test_frozen_parameters_stay_as_they_are(tmp_path, engine, method):
    federation = ragged(clients=6, sizes=(9, 20))
    module = zoo.frozen((6,), 3)
    run = fit(federation, method, model=module, rounds=2, clients_per_round=3, engine=engine, processes=1)
    assert "1.weight" not in run.method.problem.model.names
    assert "steps" not in run.method.problem.model.names
    x, y = federation.x[:7].numpy(), federation.y[:7].numpy()
    model = run.personalize(x, y)
    network = getattr(model.network, "network", model.network)
    assert torch.equal(network[1].weight, module[1].weight)
    assert not torch.equal(network[3].weight, module[3].weight)
    model.save(tmp_path / "me.safetensors")
    again = PersonalModel.load(tmp_path / "me.safetensors", zoo.frozen((6,), 3))
    np.testing.assert_array_equal(again.probabilities(x), model.probabilities(x))


def test_a_model_that_is_all_frozen_is_refused():
    with pytest.raises(PefllError, match="PEFLL-N025"):
        Network(nn.Linear(6, 3).requires_grad_(False))


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", ["fedrep", "knn-per"])
def test_a_model_may_be_nothing_but_its_last_layer(engine, method):
    federation = ragged(clients=6, sizes=(9, 20))
    run = fit(federation, method, model=zoo.flat((6,), 3), rounds=1, clients_per_round=3, engine=engine, processes=1)
    x, y = federation.x[:7].numpy(), federation.y[:7].numpy()
    assert run.personalize(x, y).probabilities(x).shape == (7, 3)


class Holding(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.layers[0](x))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.complex64))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "PEFLL-N031"),
        (lambda: nn.Sequential(Complex()), r"layer '0' .* complex parameter 'scale'.*PEFLL-N032"),
        (lambda: Holding([nn.Linear(6, 4)]), r"'layers'.*PEFLL-N033"),
        (
            lambda: nn.utils.weight_norm(nn.Linear(6, 3)),
            r"'weight'.*parametrizations.*PEFLL-N034",
        ),
        (lambda: nn.Embedding(6, 3, sparse=True), r"\bsparse\b.*PEFLL-N030"),
        (lambda: nn.EmbeddingBag(6, 3, scale_grad_by_freq=True), r"\bscale_grad_by_freq\b.*PEFLL-N030"),
    ],
)
def test_parameters_that_cannot_be_learnt_are_refused(make, sentence):
    with pytest.raises(PefllError, match=sentence):
        Network(make())


def test_layers_that_are_known_by_name_may_be_in_a_list_too():
    module = Holding(nn.ModuleList([nn.Linear(6, 4)]))
    module.again = [module.layers[0], torch.relu]
    check_model(Network(module), (6,), 3, tokens=False)


class Does(nn.Linear):
    """A linear layer, and a function of its output, of itself and of its input."""

    def __init__(self, function, **options):
        super().__init__(6, 3, **options)
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x.to(self.weight.dtype)), self, x)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda z, layer, x: z.squeeze(),
            r"\(3,\).*\(1, 3\).*squeeze.*PEFLL-N015",
        ),
        (lambda z, layer, x: z + x.mul_(2).sum(1, keepdim=True), "PEFLL-N007"),
        (lambda z, layer, x: z if layer.training else z.softmax(1), "PEFLL-N013"),
        (lambda z, layer, x: z.double(), r"torch\.float64.*PEFLL-N010"),
        (lambda z, layer, x: z.detach().numpy() if len(x) == 1 else z, "PEFLL-N015"),
        (lambda z, layer, x: layer.weight.data.clamp_(-0.01, 0.01).sum() + z, r"parameter 'weight'.*PEFLL-N006"),
    ],
)
def test_models_that_do_what_training_or_use_cannot_are_refused(function, sentence):
    with pytest.raises(PefllError, match=sentence):
        check_model(Network(Does(function)), (6,), 3, tokens=False)


def test_parameters_of_other_types_are_refused():
    with pytest.raises(PefllError, match=r"parameter 'weight'.*torch\.float64.*model\.float\(\).*PEFLL-N004"):
        check_model(Network(Does(lambda z, layer, x: z.float(), dtype=torch.float64)), (6,), 3, tokens=False)


def test_a_model_may_take_features_for_numbers_of_words():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 3)

        def forward(self, x):
            return self.words(x.long()).mean(1)

    check_model(Network(Words()), (6,), 3, tokens=False)


def test_a_recorded_model_fails_in_the_users_own_line():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(self.words(x).mean(1))

    network = Network(Narrow())
    with pytest.raises(IndexError) as caught:
        network(network.init(0, "x"), torch.full((2, 6), 7))
    assert any(entry.name == "forward" and entry.path.name == "test_network.py" for entry in caught.traceback)


def test_a_model_by_import_path_gives_the_same_run_whatever_was_drawn_before(tmp_path):
    federation = ragged(clients=4, sizes=(9,))
    runs = []
    for draws in (0, 5):
        torch.rand(draws)
        settings = {"rounds": 1, "local_steps": 1, "processes": 1}
        runs.append(fit(federation, "fedavg", model="tests.models.zoo:tied", out=tmp_path / str(draws), **settings))
    assert torch.equal(runs[0].final.theta, runs[1].final.theta)
    assert runs[0].summary["model"] == "tests.models.zoo:tied"
