"""Pooled convolutions in C beside torch's own, and what happens where they cannot be compiled."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pefll.backend import blocks
from pefll.backend.geometry import Geometry
from pefll.backend.native import compiler, pooled
from pefll.core.errors import PefllError
from pefll.models import lenet
from pefll.models.network import Network

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
    """Forget what was compiled, before and after, and whenever it is called."""

    def forget() -> None:
        for each in (compiler.compiler, compiler.library, pooled.works, pooled._kernels):
            each.cache_clear()

    forget()
    yield forget
    forget()


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
def test_nothing_is_read_beyond_the_end_of_memory():
    """The last row's last vector would reach past the array: such a picture is copied first."""
    s = Geometry(3, 8, 8, 4, 5, 5, 1, 0, 2, True)
    kernels = pooled._kernels(pooled._constants(s))
    flat = torch.zeros(8 * 8 * 3)
    tight = flat.as_strided((1, 3, 8, 8), (192, 1, 24, 3))
    assert pooled._as_nhwc(tight, s, kernels).data_ptr() != flat.data_ptr()
    roomy = pooled._empty_nhwc(1, 8, 8, 3)
    assert pooled._as_nhwc(roomy, s, kernels).data_ptr() == roomy.data_ptr()


@needs_a_compiler
def test_only_wanted_gradients_are_computed():
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
def test_a_network_computes_the_same_with_and_without_a_compiler(forgetful, monkeypatch):
    calls: list[Geometry] = []
    real = pooled.convolve
    monkeypatch.setattr(blocks.pooled, "convolve", lambda *a: calls.append(a[-1]) or real(*a))
    with_them = whole_step(0)
    assert len(calls) == 2
    forgetful()
    monkeypatch.setenv("PEFLL_CC", "none")
    without = whole_step(0)
    assert len(calls) == 2
    for a, b in zip(with_them, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@needs_a_compiler
def test_flops_are_counted_as_without_c_kernels():
    network = Network(lenet((3, 32, 32), 10))
    theta, x = network.init(0, "model"), torch.zeros(2, 3, 32, 32)
    with FlopCounterMode(display=False) as ours:
        network(theta, x)
    with FlopCounterMode(display=False) as theirs:
        network.module(x)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


@needs_a_compiler
@pytest.mark.parametrize("activation", [nn.ELU, nn.LeakyReLU, nn.ReLU6])
def test_activations_may_overwrite_pooled_outputs(activation):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), activation(), nn.Flatten(), nn.Linear(36, 2))
    in_place = nn.Sequential(*plain[:2], activation(inplace=True), *plain[3:])
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    theta = Network(plain).init(0, "model").requires_grad_()
    (ours,) = torch.autograd.grad(Network(in_place)(theta, x).square().sum(), theta)
    named = Network(plain).unflatten(theta)
    (theirs,) = torch.autograd.grad(torch.func.functional_call(plain, named, (x,)).square().sum(), theta)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def block(x, weight, bias):
    return blocks.conv_block(x, weight, bias, 1, 0, 1, 1, True, 2)


@needs_a_compiler
@pytest.mark.filterwarnings("ignore")  # of what is lost in a trace, and that traces are of the past
def test_tracing_sees_torchs_operations(monkeypatch):
    x, weight, bias = integers(0, 2, 2, 6, 6), integers(1, 3, 2, 3, 3), integers(2, 3)
    expected = block(x, weight, bias)
    monkeypatch.setattr(blocks.pooled, "convolve", lambda *_: pytest.fail("hidden from who traces"))
    assert torch.equal(torch.jit.trace(lambda x: block(x, weight, bias), x, check_trace=False)(x), expected)


@needs_a_compiler
def test_a_compiled_function_may_call_them():
    x, weight, bias = integers(0, 8, 3, 32, 32), integers(1, 16, 3, 5, 5).requires_grad_(), integers(2, 16)
    compiled = torch.compile(lambda x: block(x, weight, bias), backend="eager")
    for _ in range(5):  # memory that was let go too early would be written over by now
        (ours,) = torch.autograd.grad(compiled(x).sum(), weight)
        (theirs,) = torch.autograd.grad(block(x, weight, bias).sum(), weight)
        assert torch.equal(ours, theirs)


@needs_a_compiler
@pytest.mark.parametrize("bias", [torch.zeros(3, dtype=torch.float64), torch.zeros(1)])
def test_a_wrong_bias_raises_torchs_error(bias):
    with pytest.raises(RuntimeError):
        block(torch.zeros(1, 2, 6, 6), torch.zeros(3, 2, 3, 3), bias)


def program(folder: Path, ending: str) -> str:
    """Return the path of a compiler that has a name and then ends so."""
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo a compiler && exit 0\n{ending}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("ending", ["exit 1", "exit 0  # says that all is well, and writes nothing"])
def test_a_broken_compiler_counts_as_none(ending, forgetful, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PEFLL_CC", program(tmp_path, ending))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not pooled.works()
    assert not pooled.takes(Geometry(1, 8, 8, 2, 3, 3, 1, 0, 2, True))
    assert not list(tmp_path.glob("cache/pefll/*"))
    scores, _ = whole_step(0)
    assert scores.shape == (4, 10)


def test_a_compiler_that_is_named_must_be_there(forgetful, monkeypatch):
    monkeypatch.setenv("PEFLL_CC", "gcc -m64")
    with pytest.raises(PefllError, match=r"does not exist: gcc -m64.*PEFLL-E004"):
        pooled.works()


@needs_a_compiler
def test_a_compiler_that_fails_later_is_an_error(forgetful, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pooled.works()
    monkeypatch.setattr(compiler, "_compile", lambda *_: False)
    with pytest.raises(PefllError, match="PEFLL-E005"):
        block(torch.zeros(1, 2, 6, 6), torch.zeros(3, 2, 3, 3), None)


@needs_a_compiler
def test_it_is_compiled_once_and_kept(forgetful, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pooled.works()
    (kept,) = tmp_path.glob("pefll/*")
    assert kept.suffix == ".so"
    forgetful()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert pooled.works()


@needs_a_compiler
@pytest.mark.parametrize("bytes_left", [0, 11, 5_000, -1])
def test_a_library_that_is_cut_off_is_compiled_again(bytes_left, forgetful, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pooled.works()
    (kept,) = tmp_path.glob("pefll/*")
    whole = kept.read_bytes()
    kept.unlink()  # the old one is loaded, and must not change under whoever has it
    kept.write_bytes(whole[:bytes_left])
    forgetful()
    assert pooled.works()
    assert len(kept.read_bytes()) >= len(whole) - 64


@needs_a_compiler
@pytest.mark.parametrize("lacks", ["a folder", "a home", "space"])
def test_a_cache_that_cannot_be_written_is_not_used(lacks, forgetful, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if lacks == "a folder":
        (tmp_path / "pefll").write_text("a file")
    elif lacks == "a home":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        monkeypatch.chdir(tmp_path)
    else:

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    assert pooled.works()
    assert not list(tmp_path.glob("**/*.tmp"))
    assert not list(tmp_path.glob("**/*.so"))


@pytest.mark.parametrize(
    "refused",
    [
        Geometry(3, 32, 32, 8, 5, 5, 1, 0, 1, True),  # nothing is pooled
        Geometry(3, 4, 4, 8, 5, 5, 1, 0, 2, True),  # nothing comes out
        Geometry(3, 600, 600, 8, 5, 5, 1, 0, 2, True),  # larger than a cache
        Geometry(3, 64, 64, 8, 5, 5, 1, 0, 16, True),  # a route would not fit a byte
    ],
)
def test_convolutions_that_torch_computes(refused):
    assert not pooled.takes(refused)
