"""Batch normalisation is replaced by GroupNorm, with its weights and biases."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pefll
from pefll.core.errors import PefllError
from pefll.models import Network, check_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)

    def forward(self, x):
        return self.bn(self.conv(x))


def nested() -> nn.Sequential:
    shared = nn.BatchNorm1d(16)
    layers = [Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), shared, nn.Linear(16, 16), shared, nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for norm in (model[0].bn, shared):
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-1, 1)
    return model


def replaced(model: nn.Module) -> nn.Module:
    with pytest.warns(UserWarning, match="replace_batchnorm"):
        return pefll.replace_batchnorm(model)


def test_nested_layers_become_group_norms_with_their_weights():
    model = nested()
    before = copy.deepcopy(model.state_dict())
    copied = replaced(model)
    assert isinstance(model[0].bn, nn.BatchNorm2d)  # the model is not changed
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    norm, features = copied[0].bn, copied[3]
    assert (type(norm), norm.num_groups) == (nn.GroupNorm, 2)
    assert (type(features), features.num_groups) == (nn.GroupNorm, 1)
    assert copied[5] is features  # a shared layer stays shared
    for mine, theirs in ((norm, model[0].bn), (features, model[3])):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.bias, theirs.bias)
        assert mine.weight is not theirs.weight
    check_model(Network(copied), (3, 8, 8), 4, tokens=False)


def test_the_output_is_that_of_a_group_norm():
    model = nn.BatchNorm2d(16, eps=0.1)
    with torch.no_grad():
        model.weight.uniform_(0.5, 2)
        model.bias.uniform_(-1, 1)
    x = torch.randn(2, 16, 5, 5)
    groups = x.view(2, 2, -1)
    mean, variance = groups.mean(2, keepdim=True), groups.var(2, unbiased=False, keepdim=True)
    wanted = ((groups - mean) / (variance + 0.1).sqrt()).view_as(x)
    wanted = wanted * model.weight.view(-1, 1, 1) + model.bias.view(-1, 1, 1)
    torch.testing.assert_close(replaced(model)(x), wanted)


def test_the_warning_names_the_layers():
    with pytest.warns(UserWarning, match=r"2 layers.*0\.bn \(16 channels, 2 groups\) and 3 \("):
        pefll.replace_batchnorm(nested())
    with pytest.warns(UserWarning, match="no layer"):
        pefll.replace_batchnorm(nn.Linear(2, 2))


def test_options_of_layers_are_kept():
    frozen = nn.BatchNorm3d(12, affine=True).double().eval().requires_grad_(False)
    copied = replaced(
        nn.Sequential(frozen, nn.BatchNorm2d(12, affine=False), nn.InstanceNorm2d(6, track_running_stats=True))
    )
    assert copied[0].weight.dtype == torch.float64
    assert not copied[0].weight.requires_grad
    assert not copied[0].training
    assert copied[0].num_groups == 1
    assert copied[1].weight is None
    assert copied[2].num_groups == 6


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("resnet20", "PEFLL-N530"),
        (nn.Sequential(nn.BatchNorm1d(1)), "PEFLL-N533"),
        (nn.LazyBatchNorm2d(), "PEFLL-N532"),
        (type("Own", (nn.Module,), {"track_running_stats": True})(), "PEFLL-N531"),
    ],
)
def test_what_cannot_be_replaced_is_said(model, code):
    with pytest.raises(PefllError) as error:
        pefll.replace_batchnorm(model)
    assert error.value.code == code


def test_the_refusal_of_batch_norm_names_the_function():
    with pytest.raises(PefllError, match=r"pefll\.replace_batchnorm") as error:
        Network(nested())
    assert error.value.code == "PEFLL-N028"
