"""The CUDA C++ kernels against plain torch: on a GPU where there is one, else on the CPU, thread by thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pefll.backend.geometry import Geometry

pytest.importorskip("triton", reason="Triton is not installed")  # whose kernels are beside these
from pefll.backend.kernels import compiled, pictures

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(not ON_GPU and shutil.which("g++") is None, reason="neither a GPU nor g++ is here")
EXAMPLES = settings(
    max_examples=60 if ON_GPU else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
LENET = Geometry(3, 32, 32, 16, 5, 5, 1, 0, 2, True)
HERE = Path(__file__).parent
REAL_KERNEL = compiled.kernel.__wrapped__


@pytest.fixture(autouse=True)
def emulator(monkeypatch, tmp_path_factory):
    if not ON_GPU:
        folder = tmp_path_factory.getbasetemp() / "emulated"
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(compiled, "kernel", lambda *which: emulated(folder, *which[:3]))


@cache
def emulated(folder, name, source, constants):
    """Compile a kernel for the CPU, and return what launches it; see `compiled.kernel`."""
    kernels = Path(compiled.__file__).parent
    text = (kernels / source).read_text()
    begin = text.index(f"{name}(")
    parameters = text[begin + len(name) + 1 : text.index(")", begin)]
    names = ", ".join(parameter.split()[-1].strip("*") for parameter in parameters.split(","))
    file = folder / f"{name}-{abs(hash(constants))}.cpp"
    file.write_text(
        f'#include "{HERE}/cuda_on_cpu.hpp"\n#include "{kernels / source}"\n'
        f'extern "C" void emulate(int gx, int gy, int threads, long bytes, {parameters}) {{\n'
        f"  emulated::launch(gx, gy, threads, bytes, [=]() mutable {{ {name}({names}); }});\n}}\n"
    )
    library = file.with_suffix(".so")
    defined = [f"-D{key}={value}" for key, value in constants]
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defined, str(file), "-o", str(library)]
    subprocess.run(command, check=True)
    emulate = ctypes.CDLL(str(library)).emulate

    def launch(grid, threads, shared, arguments):
        emulate(*grid, threads, ctypes.c_long(shared), *(compiled._value(argument) for argument in arguments))

    return launch


def rounded(x, precision):
    """Return x with the few digits that products keep, in float64."""
    if precision == "bf16":
        return x.to(torch.bfloat16).double()
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(got, wanted, within):
    assert got.shape == wanted.shape
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=within * max(size, 1.0))


def plain(x, w, bias, s):
    """Return the block's outputs, of one client, in float64."""
    y = F.conv2d(x, w, bias, 1, s.padding)
    y = F.max_pool2d(y, s.pool) if s.pool > 1 else y
    return F.relu(y) if s.relu else y


def check(s, precision, clients, samples, channels_first=False, x_last=True, biased=True):
    """Compare outputs and all gradients with those of rounded factors in float64."""
    x = random(clients, samples, s.ci, s.h, s.w, seed=1)
    if x_last:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    w, bias = random(clients, s.co, s.ci, s.kh, s.kw, seed=2), random(clients, s.co, seed=3)
    y, route = pictures.forward(x, w, bias if biased else None, s, precision, channels_first)
    g = random(*y.shape, seed=4)
    g = g if channels_first else g.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    dw, db = pictures.weight_gradient(g, route, x, s, precision)
    for i in range(clients):
        wide = [number.requires_grad_() for number in (rounded(w[i], precision), bias[i].double())]
        wanted = plain(rounded(x[i], precision), wide[0], wide[1] if biased else None, s)
        close(y[i], wanted.detach(), 1e-5)
        # Gradients flow where the kernel's largest position was, which two nearly equal sums may disagree about.
        gw, gb = torch.autograd.grad(wanted, wide, rounded(g[i], precision), allow_unused=True)
        close(dw[i], gw, 1e-5)
        if biased:
            close(db[i], gb, 1e-5)


@st.composite
def convolutions(draw):
    pool = draw(st.sampled_from([1, 2]))
    kh, kw = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    padding = draw(st.integers(0, min(kh, kw) - 1))
    least = pool - 1 + max(kh, kw)
    ci, co = draw(st.integers(1, 4)), draw(st.sampled_from([1, 5, 8, 16, 40]))
    h, w = (max(1, least - 2 * padding) + draw(st.integers(0, 7)) for _ in range(2))
    return Geometry(ci, h, w, co, kh, kw, 1, padding, pool, draw(st.booleans()))


@EXAMPLES
@given(
    convolutions(),
    st.sampled_from(["bf16", "tf32"]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_convolution(s, precision, clients, samples, channels_first, x_last, biased):
    assume(pictures.fits(s, precision))
    check(s, precision, clients, samples, channels_first, x_last, biased)


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_lenet(precision, samples):
    check(LENET, precision, 2, samples)


# What random shapes seldom have: whole chunks, fetches of four, several tiles of filters, one warp for all positions.
POOLED, PADDED = Geometry(4, 10, 10, 64, 6, 6, 1, 0, 2, True), Geometry(4, 9, 8, 40, 3, 3, 1, 1, 1, True)


@pytest.mark.parametrize(
    ("precision", "s"),
    [
        ("bf16", POOLED),
        ("tf32", PADDED),
        pytest.param("bf16", PADDED, marks=pytest.mark.slow),
        pytest.param("tf32", POOLED, marks=pytest.mark.slow),
    ],
)
def test_four_channels_and_many_filters(s, precision):
    assert pictures.fits(s, precision)
    check(s, precision, 2, 3)


# With pooling and without, fetches of four and not, tiles of filters that are not full, and a channel for odd columns.
SMALL, ONE_CHANNEL = LENET._replace(h=12, w=12), Geometry(1, 9, 8, 20, 3, 3, 1, 1, 1, True)
LINEAR = Geometry(2, 7, 7, 6, 3, 2, 1, 0, 1, False)


@pytest.mark.parametrize(
    ("s", "g_last"),
    [
        (SMALL, False),
        (LINEAR, True),
        # Each of these compiles kernels of its own, which takes half a minute.
        *(pytest.param(s, True, marks=pytest.mark.slow) for s in (SMALL, ONE_CHANNEL)),
        *(pytest.param(s, False, marks=pytest.mark.slow) for s in (ONE_CHANNEL, LINEAR)),
    ],
)
def test_bf16_outputs(s, g_last):
    """Outputs that are written as bfloat16 are the others rounded, and gradients of that type are used as they are."""
    x, w, bias = random(2, 3, s.ci, s.h, s.w), random(2, s.co, s.ci, s.kh, s.kw, seed=1), random(2, s.co, seed=2)
    (y, route), (narrow, same_route) = (
        pictures.forward(x, w, bias, s, "bf16", channels_first=False, bf16_out=bf16) for bf16 in (False, True)
    )
    assert narrow.dtype == torch.bfloat16
    assert narrow.stride() == y.stride()
    assert torch.equal(narrow, y.bfloat16())
    assert not s.routed or torch.equal(route, same_route)
    g = random(2, 3, s.ph, s.pw, s.co, seed=3).permute(0, 1, 4, 2, 3)
    g = g if g_last else g.contiguous()
    wanted = pictures.weight_gradient(g, route, x, s, "bf16")
    for half in (g.bfloat16(), random(2, 4, s.co, s.ph, s.pw).bfloat16()[:, 1:].copy_(g)):  # also as a part of more
        got = pictures.weight_gradient(half, route, x, s, "bf16")
        assert all(part.dtype == torch.float32 for part in got)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_block_loops_over_pictures(precision, monkeypatch):
    monkeypatch.setattr(pictures, "BLOCKS", 1)
    check(LENET._replace(h=10, w=10), precision, 2, 11)


def test_nan_is_not_hidden():
    s = LENET._replace(h=8, w=8)
    x = random(1, 1, 3, 8, 8)
    x[0, 0, 0, 0, 0] = float("nan")
    y, _ = pictures.forward(x, random(1, 16, 3, 5, 5), None, s, "bf16", channels_first=False)
    assert y[0, 0, :, 0, 0].isnan().all()
    assert not y[0, 0, :, 1, 1].isnan().any()


def test_convolutions_that_do_not_fit():
    assert all(pictures.fits(LENET, precision) for precision in ("bf16", "tf32"))
    assert not pictures.fits(LENET._replace(stride=2), "bf16")
    assert not pictures.fits(LENET._replace(ci=5), "bf16")
    assert not pictures.fits(LENET._replace(co=65), "bf16")
    assert not pictures.fits(LENET, "bf16", shared=1024)
    assert not pictures.takes(LENET, "bf16", torch.device("cpu"))


def test_machine_code_is_kept(monkeypatch, tmp_path):
    compilations = []

    def compile_(text, source, options):
        compilations.append(options)
        return b"code %d" % len(compilations)

    monkeypatch.setattr(compiled, "_compile", compile_)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, other = (("BF16", 1),), (("BF16", 0),)
    device = torch.device("cuda", 0)
    assert compiled.machine_code("pictures.cu", first, device)[0] == b"code 1"
    assert compiled.machine_code("pictures.cu", first, device)[0] == b"code 1"
    assert compiled.machine_code("pictures.cu", other, device)[0] == b"code 2"  # other constants are other code
    assert "--gpu-architecture=sm_90" in compilations[0]
    assert [path.suffix for path in (tmp_path / "cache" / "pefll").iterdir()] == [".cubin"] * 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where nothing can be written
    assert compiled.machine_code("pictures.cu", first, device)[0] == b"code 3"


def test_without_a_compiler_triton_takes_over(monkeypatch):
    def absent(*_):
        raise RuntimeError("there is no libnvrtc.so.13")

    monkeypatch.setattr(compiled, "kernel", absent)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    compiled.works.cache_clear()
    with pytest.warns(UserWarning, match="no libnvrtc"):
        assert not compiled.works(torch.device("cuda", 0))
    compiled.works.cache_clear()


def test_damaged_machine_code_is_made_again(monkeypatch, tmp_path):
    loaded = []

    class Driver:
        def cuModuleLoadData(self, module, code):
            loaded.append(code)
            return 200 if code == b"" else 0

        def __getattr__(self, name):
            return lambda *_: 0

    monkeypatch.setattr(compiled, "_compile", lambda *_: b"code")
    monkeypatch.setattr(compiled, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", 0)
    _, kept = compiled.machine_code("compile_probe.cu", (("BF16", 1),), device)
    kept.write_bytes(b"")
    REAL_KERNEL("compile_probe", "compile_probe.cu", (("BF16", 1),), device)
    assert loaded == [b"", b"code"]
    assert kept.read_bytes() == b"code"
