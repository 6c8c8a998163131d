"""Pooled convolutions in C beside torch's own, and what happens where they cannot be compiled."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pefll.models import lenet
from pefll.models.network import Network
from pefll.ops import blocks
from pefll.ops.geometry import Geometry
from pefll.ops.native import compiler, pooled

needs_a_compiler = pytest.mark.skipif(compiler.compiler() is None, reason="there is no C compiler here")

# Channels in and out, sides of the kernel, stride, pool, relu: what the compiler is told. Sizes come at run time.
COMPILED = [
    (3, 16, 5, 5, 1, 2, True),
    (16, 32, 5, 5, 1, 2, True),
    (1, 7, 3, 2, 1, 2, False),
    (4, 9, 2, 3, 2, 3, True),
    (33, 17, 3, 3, 1, 2, True),
    (40, 3, 1, 1, 1, 4, False),
    (30, 24, 7, 5, 1, 2, True),
    (8, 33, 9, 1, 3, 2, True),
]


@pytest.fixture
def forgetful():
    """Forget what was compiled, before and after."""
    caches = (compiler.compiler, compiler.library, pooled._kernels)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def integers(seed: int, *shape: int, most: int = 3) -> torch.Tensor:
    """Small whole numbers: sums of their products are exact, in whatever order, and ties are frequent."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def through_torch(x, weight, bias, s: Geometry):
    y = F.max_pool2d(F.conv2d(x, weight, bias, s.stride, s.padding), s.pool)
    return F.relu(y) if s.relu else y


@needs_a_compiler
@given(
    compiled=st.sampled_from(COMPILED),
    samples=st.integers(1, 4),
    rows=st.integers(1, 34),
    columns=st.integers(1, 34),
    padding=st.integers(0, 2),
    biased=st.booleans(),
    channels_last=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_outputs_and_gradients_are_torchs(compiled, samples, rows, columns, padding, biased, channels_last, seed):
    ci, co, kh, kw, stride, pool, relu = compiled
    s = Geometry(ci, rows, columns, co, kh, kw, stride, padding, pool, relu)
    if rows + 2 * padding < kh or columns + 2 * padding < kw or not s.ph or not s.pw:
        return
    assert pooled.takes(s)
    x, weight = integers(seed, samples, ci, rows, columns), integers(seed + 1, co, ci, kh, kw)
    bias = integers(seed + 2, co) if biased else None
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    given_ = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    ours, theirs = pooled.convolve(x, weight, bias, s), through_torch(x, weight, bias, s)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    g = integers(seed + 3, *theirs.shape)
    for a, b in zip(torch.autograd.grad(ours, given_, g), torch.autograd.grad(theirs, given_, g), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@needs_a_compiler
def test_a_picture_that_ends_where_memory_does_is_not_read_beyond_it():
    """The last row's last vector would reach past the array: such a picture is copied first."""
    s = Geometry(3, 8, 8, 4, 5, 5, 1, 0, 2, True)
    kernels = pooled._kernels(pooled._constants(s))
    flat = torch.zeros(8 * 8 * 3)
    tight = flat.as_strided((1, 3, 8, 8), (192, 1, 24, 3))
    assert pooled._laid(tight, s, kernels).data_ptr() != flat.data_ptr()
    roomy = pooled._pictures(1, 8, 8, 3)
    assert pooled._laid(roomy, s, kernels).data_ptr() == roomy.data_ptr()


@needs_a_compiler
def test_only_what_is_asked_for_gets_a_gradient():
    s = Geometry(2, 6, 6, 3, 3, 3, 1, 0, 2, True)
    x, weight, bias = integers(0, 2, 2, 6, 6), integers(1, 3, 2, 3, 3).requires_grad_(), integers(2, 3)
    (of_weight,) = torch.autograd.grad(pooled.convolve(x, weight, bias, s).sum(), weight)
    (expected,) = torch.autograd.grad(through_torch(x, weight, bias, s).sum(), weight)
    assert torch.equal(of_weight, expected)
    assert not pooled.convolve(x, weight.detach(), bias, s).requires_grad


@needs_a_compiler
def test_second_derivatives_are_refused():
    s = Geometry(1, 4, 4, 1, 3, 3, 1, 0, 2, True)
    weight = torch.ones(1, 1, 3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(
        pooled.convolve(torch.ones(1, 1, 4, 4), weight, None, s).square().sum(), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def whole_step(seed: int) -> list[torch.Tensor]:
    network = Network(lenet((3, 32, 32), 10))
    theta = network.init(seed, "model").requires_grad_()
    scores = network(theta, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed)))
    loss = F.cross_entropy(scores, torch.arange(4))
    return [scores.detach(), *torch.autograd.grad(loss, theta)]


@needs_a_compiler
def test_a_network_uses_them_and_does_without_them(forgetful, monkeypatch):
    calls: list[Geometry] = []
    real = pooled.convolve
    monkeypatch.setattr(blocks.pooled, "convolve", lambda *a: calls.append(a[-1]) or real(*a))
    with_them = whole_step(0)
    assert len(calls) == 2
    for each in (compiler.compiler, compiler.library, pooled._kernels):
        each.cache_clear()
    monkeypatch.setenv("PEFLL_CC", "none")
    without = whole_step(0)
    assert len(calls) == 2
    for a, b in zip(with_them, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@needs_a_compiler
def test_operations_are_counted_as_if_they_were_not_there():
    network = Network(lenet((3, 32, 32), 10))
    theta, x = network.init(0, "model"), torch.zeros(2, 3, 32, 32)
    with FlopCounterMode(display=False) as ours:
        network(theta, x)
    with FlopCounterMode(display=False) as theirs:
        network.module(x)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


@pytest.mark.parametrize("wrong", ["absent", "failing", "silent"])
def test_a_compiler_that_does_not_work_is_none(wrong, forgetful, monkeypatch, tmp_path: Path):
    program = tmp_path / "cc"
    if wrong != "absent":
        ending = "exit 1" if wrong == "failing" else "exit 0"  # says that all is well, and writes nothing
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo a compiler && exit 0\n{ending}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PEFLL_CC", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not pooled.takes(Geometry(1, 8, 8, 2, 3, 3, 1, 0, 2, True))
    assert not list(tmp_path.glob("cache/pefll/*"))
    scores, _ = whole_step(0)
    assert scores.shape == (4, 10)


@needs_a_compiler
def test_it_is_compiled_once_and_kept(forgetful, monkeypatch, tmp_path: Path):
    s = Geometry(1, 8, 8, 2, 3, 3, 1, 0, 2, True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pooled.takes(s)
    (kept,) = tmp_path.glob("pefll/*")
    compiler.library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.library("pooled.c", pooled._constants(s)) is not None
    assert kept.suffix == ".so"


@needs_a_compiler
@pytest.mark.parametrize("broken", ["damaged", "not a folder"])
def test_a_cache_that_cannot_be_used_is_done_without(broken, forgetful, monkeypatch, tmp_path: Path):
    s = Geometry(1, 8, 8, 2, 3, 3, 1, 0, 2, False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if broken == "damaged":
        assert pooled.takes(s)
        (kept,) = tmp_path.glob("pefll/*")
        kept.write_bytes(b"no library")
        compiler.library.cache_clear()
        pooled._kernels.cache_clear()
    else:
        (tmp_path / "pefll").write_text("a file")
    assert pooled.takes(s)


@pytest.mark.parametrize(
    "refused",
    [
        Geometry(3, 32, 32, 8, 5, 5, 1, 0, 1, True),  # nothing is pooled
        Geometry(3, 4, 4, 8, 5, 5, 1, 0, 2, True),  # nothing comes out
        Geometry(3, 600, 600, 8, 5, 5, 1, 0, 2, True),  # larger than a cache
        Geometry(3, 64, 64, 8, 5, 5, 1, 0, 16, True),  # a route would not fit a byte
    ],
)
def test_what_they_are_not_for(refused):
    assert not pooled.takes(refused)
