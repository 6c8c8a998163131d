"""Blocks against the layers they stand for; derivatives alone and under transforms."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pefll.backend.alone import alone, is_constant
from pefll.backend.blocks import conv_block, linear_block
from pefll.core.derivatives import gradient, pull_back


@given(
    b=st.integers(1, 3),
    ci=st.integers(1, 3),
    co=st.integers(1, 3),
    groups=st.integers(1, 3),
    sides=st.tuples(st.integers(7, 11), st.integers(7, 11)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    pool=st.integers(1, 2),
    relu=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=40, deadline=None)
def test_a_block_is_convolution_relu_and_pooling(
    b, ci, co, groups, sides, kernel, stride, padding, dilation, pool, relu, bias, dtype
):
    x = torch.randn(b, ci * groups, *sides, dtype=dtype, requires_grad=True)
    weight = torch.randn(co * groups, ci, *kernel, dtype=dtype, requires_grad=True)
    shift = torch.randn(co * groups, dtype=dtype, requires_grad=True) if bias else None
    leaves = [leaf for leaf in (x, weight, shift) if leaf is not None]
    got = conv_block(x, weight, shift, stride, padding, dilation, groups, relu, pool)
    wanted = F.conv2d(x, weight, shift, stride, padding, dilation, groups)
    wanted = F.max_pool2d(wanted.relu() if relu else wanted, pool)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(got, wanted, **close)
    cotangent = torch.randn_like(wanted)
    if dtype == torch.float64:  # in float32 rounding may choose another of two almost equal values
        for ours, theirs in zip(
            torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(wanted, leaves, cotangent), strict=True
        ):
            torch.testing.assert_close(ours, theirs, **close)


@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(4, 13), st.integers(4, 13)),
    out=st.integers(1, 20),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    pool=st.integers(1, 3),
    relu=st.booleans(),
    deep=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_with_whole_numbers_blocks_alone_are_exact_also_where_values_tie(
    seed, shape, out, kernel, stride, padding, pool, relu, deep
):
    if any((side + 2 * padding - kernel) // stride + 1 < pool for side in shape[2:]):
        return
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, shape, generator=draw).float().requires_grad_(deep)
    weight = torch.randint(-1, 2, (out, shape[1], kernel, kernel), generator=draw).float().requires_grad_()
    bias = torch.randint(-1, 2, (out,), generator=draw).float().requires_grad_()
    leaves = [x, weight, bias] if deep else [weight, bias]
    got = conv_block(x, weight, bias, stride, padding, 1, 1, relu, pool)
    y = F.conv2d(x, weight, bias, stride, padding)
    wanted = F.max_pool2d(y.relu() if relu else y, pool)
    assert torch.equal(got, wanted)
    cotangent = torch.randint(-2, 3, wanted.shape, generator=draw).float()
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(wanted, leaves, cotangent), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_block_of_no_pictures_is_empty():
    assert conv_block(torch.zeros(0, 2, 8, 8), torch.ones(3, 2, 3, 3), None, 1, 0, 1, 1, True, 2).shape == (0, 3, 3, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_alone_on_a_cpu_activations_have_their_channels_innermost(channels):
    x, weight = torch.randn(2, channels, 12, 12), torch.randn(4, channels, 3, 3)
    y = conv_block(x, weight, None, 1, 0, 1, 1, True, 1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()


@pytest.mark.parametrize(("channels", "innermost"), [(1, False), (3, False), (4, False), (8, True), (16, True)])
@pytest.mark.parametrize("feeds", [True, False])
def test_no_convolution_is_laid_out_so_that_onednn_writes_beyond_its_memory(monkeypatch, channels, innermost, feeds):
    convolve, given = F.conv2d, []

    def noted(x, weight, *rest):
        given.append(x.stride()[1] == 1)
        return convolve(x, weight, *rest)

    monkeypatch.setattr(F, "conv2d", noted)
    x = torch.randn(2, 8, 6, channels).permute(0, 3, 1, 2)  # as after another convolution
    weight = torch.randn(5, channels, 1, 1)
    for stride in (2, (1, 2), 1):
        conv_block(x, weight, None, stride, 0, 1, 1, True, 1, feeds_convolution=feeds)
    assert given == [innermost, innermost, True]


def test_strided_1x1_convolutions_do_not_corrupt_memory():
    code = (
        "import torch\n"
        "from pefll.backend.blocks import conv_block\n"
        "for channels in 300 * (1, 3):\n"
        "    x = torch.randn(2, channels, 8, 6, requires_grad=True)\n"
        "    weight = torch.randn(3, channels, 1, 1, requires_grad=True)\n"
        "    y = conv_block(x, weight, None, 2, 0, 1, 1, True, 1)\n"
        "    torch.autograd.grad(y.sum(), [x, weight])\n"
    )
    # A process of its own: where memory is damaged, it ends.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_blocks_map_over_clients():
    x, weight, bias = torch.randn(5, 2, 3, 8, 8), torch.randn(5, 4, 3, 3, 3), torch.randn(5, 4)
    got = torch.vmap(lambda x, w, b: conv_block(x, w, b, 1, 1, 1, 1, True, 2))(x, weight, bias)
    for client in range(5):
        alone_ = conv_block(x[client], weight[client], bias[client], 1, 1, 1, 1, True, 2)
        torch.testing.assert_close(got[client], alone_, rtol=1e-4, atol=1e-5)
    x, weight, bias = torch.randn(5, 2, 3), torch.randn(5, 4, 3), torch.randn(5, 4)
    got = torch.vmap(lambda x, w, b: linear_block(x, w, b, True))(x, weight, bias)
    torch.testing.assert_close(got, (torch.einsum("cbi,coi->cbo", x, weight) + bias[:, None]).relu())


def loss(theta: Tensor, x: Tensor) -> Tensor:
    return (theta.sin() * x).sum() ** 2


def test_alone_is_false_under_transforms():
    seen = []
    look = lambda x: seen.append(alone()) or x.sum()  # noqa: E731
    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [True, False, False]
    assert is_constant(torch.ones(1))
    leaf = torch.ones(1, requires_grad=True)
    assert not is_constant(leaf)
    with torch.no_grad():
        assert is_constant(leaf)


@pytest.mark.parametrize("enabled", [True, False])
def test_derivatives_alone_are_those_of_transforms(enabled):
    theta, x = torch.randn(4), torch.randn(4)
    with torch.set_grad_enabled(enabled):
        ours = gradient(loss, theta, x)
        assert torch.is_grad_enabled() == enabled
        torch.testing.assert_close(ours, torch.func.grad(loss)(theta, x))
        assert not ours.requires_grad
        pulled = pull_back(lambda t: t.sin() * x, theta, x)
        torch.testing.assert_close(pulled, theta.cos() * x * x)
        assert not theta.requires_grad


def test_derivatives_can_be_differentiated_again():
    theta, x = torch.randn(4), torch.randn(4)
    wanted = torch.func.hessian(loss)(theta, x)
    torch.testing.assert_close(torch.func.jacrev(lambda t: gradient(loss, t, x))(theta), wanted)
    leaf = theta.clone().requires_grad_()
    rows = [torch.autograd.grad(part, leaf, retain_graph=True)[0] for part in gradient(loss, leaf, x)]
    torch.testing.assert_close(torch.stack(rows), wanted)
    mapped = torch.vmap(lambda t: gradient(loss, t, x))(torch.stack([theta, 2 * theta]))
    torch.testing.assert_close(mapped[1], torch.func.grad(loss)(2 * theta, x))


def test_the_gradient_of_an_independent_value_is_zero():
    theta = torch.randn(3)
    assert torch.equal(pull_back(lambda t: 0 * t.detach() + t * 0, theta, theta), torch.zeros(3))
    for of_theta in (gradient(lambda t: t.detach().sum(), theta), pull_back(lambda t: t.detach(), theta, theta)):
        assert torch.equal(of_theta, torch.zeros(3))
        assert not of_theta.requires_grad
