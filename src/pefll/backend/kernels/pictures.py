"""CUDA C++ kernels for convolution, max-pooling, bias and ReLU in bfloat16 or TF32; see pictures.cu.

They have a client axis. They support only first layers, with few input channels and a stride of 1. Other layers, and
the gradient of the pictures, use `convolution`, `conv_backward_bf16` and `conv_input_grad`.
"""

from __future__ import annotations

from ctypes import c_longlong
from typing import NamedTuple

import torch
from torch import Tensor

from pefll.backend.geometry import Geometry
from pefll.backend.kernels import compiled
from pefll.backend.kernels.tiles import shared_memory

MOST_CHANNELS, MOST_FILTERS = 4, 64
MOST_SHARED = 72 << 10  # bytes of shared memory; with these, a multiprocessor of an H200 runs three blocks at once
BLOCKS = 4 * 132  # smallest number of partial sums over all pictures: four for each multiprocessor of an H200


class LaunchPlan(NamedTuple):
    """The sizes of one launch.

    Attributes:
        constants: names and values for the compiler.
        pictures: number of pictures that a block has in shared memory at once.
        threads: number of threads of a block.
        shared: bytes of shared memory of a block.
    """

    constants: tuple[tuple[str, int], ...]
    pictures: int
    threads: int
    shared: int


def takes(s: Geometry, precision: str, device: torch.device) -> bool:
    """Return whether the kernels support this convolution with this precision on this device."""
    if device.type != "cuda" or precision not in ("bf16", "tf32"):
        return False
    return fits(s, precision, shared_memory(device)) and compiled.works(device)


def fits(s: Geometry, precision: str, shared: int = MOST_SHARED) -> bool:
    """Return whether the kernels support this convolution with `shared` bytes of shared memory."""
    if s.stride != 1 or s.pool not in (1, 2) or s.ci > MOST_CHANNELS or s.co > MOST_FILTERS or min(s.ph, s.pw) < 1:
        return False
    plans = (_best_forward(s, precision, 1, False, False, False), _best_weights(s, precision, 1, 1, 1, False))
    return max(plan.shared for plan in plans) <= min(shared, MOST_SHARED)


def forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    s: Geometry,
    precision: str,
    channels_first: bool,
    bf16_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs [c, b, co, ph, pw] and the route, uint8 [c, b, ph, pw, co]; see `convolution`.

    Args:
        x: [c, b, ci, h, w], in any layout.
        w: [c, co, ci, kh, kw], contiguous rows.
        bias: [c, co], contiguous rows, or None.
        s: sizes of the convolution.
        precision: precision of products: bf16 or tf32.
        channels_first: whether channels are outermost in the outputs' memory; else they are innermost.
        bf16_out: whether outputs are bfloat16; else they are float32. bfloat16 outputs need the precision bf16, an even
            number of filters, and channels innermost.
    """
    clients, samples = x.shape[:2]
    last, first = (clients, samples, s.ph, s.pw, s.co), (clients, samples, s.co, s.ph, s.pw)
    written = torch.bfloat16 if bf16_out else torch.float32
    y = torch.empty(first if channels_first else last, dtype=written, device=x.device)
    route = torch.empty(last if s.routed else (clients, 1), dtype=torch.uint8, device=x.device)
    plan = _best_forward(s, precision, int(_loads_four(x)), bias is not None, channels_first, bf16_out)
    _launch(
        "convolve", plan, (_ceil_div(samples, plan.pictures), clients), x.device,
        x, w, y if bias is None else bias, y, route, samples, *_strides(x), _long(w.stride(0)),
        _long(0 if bias is None else bias.stride(0)),
    )  # fmt: skip
    return y if channels_first else y.permute(0, 1, 4, 2, 3), route


def weight_gradient(g: Tensor, route: Tensor, x: Tensor, s: Geometry, precision: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights [c, co, ci, kh, kw] and bias [c, co].

    Args:
        g: gradient of the output, with the type of the output, [c, b, co, ph, pw], in any layout.
        route: the route from `forward`, contiguous.
        x: [c, b, ci, h, w], in any layout.
        s: sizes of the convolution.
        precision: precision of products: bf16 or tf32.
    """
    clients, samples = g.shape[:2]
    bf16_out = g.dtype == torch.bfloat16
    plan = _best_weights(s, precision, int(_loads_four(x)), int(_loads_four(g)), int(g.stride(2) == 1), bf16_out)
    # `clients` is the number of clients of one run, so other runs do not change how this run is rounded.
    most = _ceil_div(samples, plan.pictures)
    loops = _ceil_div(most, max(1, min(most, _ceil_div(BLOCKS, clients))))
    shares = _ceil_div(most, loops)
    size = s.co * (s.ci * s.kh * s.kw + 1)
    partial = torch.empty((shares, clients, size), dtype=torch.float32, device=g.device)
    dw = torch.empty((clients, s.co, s.ci, s.kh, s.kw), dtype=torch.float32, device=g.device)
    db = torch.empty((clients, s.co), dtype=torch.float32, device=g.device)
    _launch(
        "weights", plan, (shares, clients), g.device,
        x, g, route, partial, samples, loops, *_strides(x), *_strides(g),
    )  # fmt: skip
    summing = plan._replace(threads=256, shared=0)
    _launch("add_up", summing, (_ceil_div(size, 256), clients), g.device, partial, dw, db, shares)
    return dw, db


def _launch(
    name: str, plan: LaunchPlan, grid: tuple[int, int], device: torch.device, *arguments: compiled.Argument
) -> None:
    run = compiled.kernel(name, "pictures.cu", plan.constants, device)
    run(grid, plan.threads, plan.shared, arguments)


def _best_forward(
    s: Geometry, precision: str, in_fours: int, biased: bool, channels_first: bool, bf16_out: bool
) -> LaunchPlan:
    """Return the best launch of `convolve`: how many pictures a block has, and how many warps share them."""
    c = {
        "CONVOLVE": 1, **_constants(s, precision), "RELU": int(s.relu), "HAS_BIAS": int(biased),
        "CHANNELS_FIRST": int(channels_first), "HALVES": int(bf16_out), "VECTOR": in_fours, "MT": 2,
    }  # fmt: skip
    cells, group = s.ph * s.pw, 8 if s.pool == 2 else 32
    pictures = 1 if cells >= 6 * group else min(4, _ceil_div(6 * group, cells))
    while pictures > 1 and _forward_plan(pictures, 1, c).shared > MOST_SHARED // 2:
        pictures -= 1
    return _forward_plan(pictures, _balanced_warps(_ceil_div(pictures * cells, group)), c)


def _forward_plan(pictures: int, warps: int, c: dict[str, int]) -> LaunchPlan:
    """Return the launch of `convolve` for these numbers of pictures and warps."""
    words, taps = _ceil_div(c["CI"], 2 if c["BF16"] else 1), c["KH"] * c["KW"]
    whole = words % 4 == 0
    pixel = words + (2 if whole and c["POOL"] == 2 else 0)
    steps = _ceil_div(c["KH"] * _ceil_div(c["KW"] * words, 4), 2)
    filter_ = (taps * (words | 1) + 4 if whole else steps * 8) + 3
    staged = _ceil_div(c["CO"], 8) * 8 * (filter_ // 8 * 8 + 4) + pictures * c["HP"] * c["WP"] * pixel + 4
    constants = {**c, "PICTURES": pictures, "WARPS": warps}
    return LaunchPlan(tuple(constants.items()), pictures, 32 * warps, 4 * staged)


def _best_weights(
    s: Geometry, precision: str, in_fours: int, g_in_fours: int, channels_last: int, bf16_out: bool
) -> LaunchPlan:
    """Return the best launch of `weights`: how many pictures a block has, and how many warps share the work."""
    rows, columns = _ceil_div(s.co, 16), _ceil_div(s.ci * s.kh * s.kw + 1, 8)
    c = {
        "WEIGHTS": 1, **_constants(s, precision), "ROUTED": int(s.routed), "G_LAST": channels_last, "VECTOR": in_fours,
        "G_VECTOR": g_in_fours, "HALVES": int(bf16_out), "MT": rows,
    }  # fmt: skip
    across = min(16, _ceil_div(columns, max(1, (12 if rows == 1 else 8) // rows)))
    slots = s.ph * (s.pw if s.pool == 2 else _ceil_div(s.pw, 2 if precision == "bf16" else 1))
    pictures = max(1, min(4, 100 // slots))
    while pictures > 1 and _weight_plan(pictures, across, 1, c).shared > MOST_SHARED // 2:
        pictures -= 1
    return _weight_plan(pictures, across, 1 if across > 2 else 4, c)


def _weight_plan(pictures: int, across: int, along: int, c: dict[str, int]) -> LaunchPlan:
    """Return the launch of `weights`. `across` warps share the columns, and `along` warps share the positions."""
    per = 2 if c["BF16"] else 1
    filled = c["WP"] // 2 + 1 if per == 2 and c["POOL"] == 1 and c["PW"] % 2 else _ceil_div(c["WP"], per)
    row = filled + (40 - filled % 32) % 16
    copy = _ceil_div(pictures * c["CI"] * (c["HP"] * row + 1), 32) * 32 + 16
    slots = pictures * c["PH"] * (c["PW"] if c["POOL"] == 2 else _ceil_div(c["PW"], per))
    staged = per * copy + slots * (c["MT"] * 16 + 8)
    tiles = _ceil_div(_ceil_div(c["CI"] * c["KH"] * c["KW"] + 1, 8), across)
    sums = 0 if along == 1 else along * c["MT"] * 16 * (across * tiles * 8 + 1)
    constants = {**c, "PICTURES": pictures, "WARPS_N": across, "WARPS_S": along}
    return LaunchPlan(tuple(constants.items()), pictures, 32 * across * along, 4 * max(staged, sums))


def _constants(s: Geometry, precision: str) -> dict[str, int]:
    """Return the constants of a convolution for the compiler."""
    return {
        "BF16": int(precision == "bf16"), "CI": s.ci, "CO": s.co, "KH": s.kh, "KW": s.kw, "IH": s.h, "IW": s.w,
        "PAD": s.padding, "HP": s.h + 2 * s.padding, "WP": s.w + 2 * s.padding, "PH": s.ph, "PW": s.pw, "POOL": s.pool,
    }  # fmt: skip


def _balanced_warps(groups: int) -> int:
    """Return the number of warps, from 4 to 8, with the fewest idle warps when they share `groups` groups."""
    return max(range(4, 9), key=lambda warps: (groups / (_ceil_div(groups, warps) * warps), warps))


def _ceil_div(total: int, each: int) -> int:
    return -(-total // each)


def _long(number: int) -> c_longlong:
    return c_longlong(number)


def _strides(x: Tensor) -> tuple[c_longlong, c_longlong, int, int, int]:
    """Return the strides of client, sample, row, column and channel of x [c, b, ci, h, w]."""
    client, sample, channel, row, column = x.stride()
    return _long(client), _long(sample), row, column, channel


def _loads_four(x: Tensor) -> bool:
    """Return whether one load can fetch four channels of x [c, b, ci, h, w]."""
    client, sample, channel, row, column = x.stride()
    whole = all(number % 4 == 0 for number in (x.shape[2], client, sample, row, column))
    return channel == 1 and whole and x.data_ptr() % (4 * x.element_size()) == 0
