"""Compares the time of LeNet's first convolution with a client axis in CUDA C++ and in Triton.

Outputs, and gradients of filters and bias, are timed separately. Each is recorded several times into one CUDA graph,
which is replayed. Both versions take turns. The figures are medians. With 15 clients, sums are split as for three runs
of 5 clients at once. This needs a GPU.

    python -m benchmarks.first_layers --out build/first_layers
"""

from __future__ import annotations

import argparse
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import Operation, card, microseconds, recorded
from pefll.backend.geometry import Geometry
from pefll.backend.kernels import conv_backward_bf16, convolution, pictures
from pefll.core.files import write_json
from pefll.engines.hardware import device_name
from pefll.training.summary import commit

BATCH = 32
LAYER = Geometry(ci=3, h=32, w=32, co=16, kh=5, kw=5, stride=1, padding=0, pool=2, relu=True)


def ways(clients: int, precision: str) -> dict[str, tuple[Operation, Operation]]:
    """Return the operations to time: each in CUDA C++ and in Triton."""
    s = LAYER
    x = torch.randn(clients, BATCH, s.h, s.w, s.ci, device="cuda").permute(0, 1, 4, 2, 3)
    w, bias = (torch.randn(clients, s.co, *rest, device="cuda") for rest in ((s.ci, s.kh, s.kw), ()))
    g = torch.randn(clients, BATCH, s.ph, s.pw, s.co, device="cuda")
    first = g.permute(0, 1, 4, 2, 3)
    route = pictures.forward(x, w, bias, s, precision, False)[1]
    triton = convolution.forward(x, w, bias, s, precision, False)

    def backward() -> Any:
        if precision != "bf16":
            return convolution.weight_gradient(g, triton.route, x, s, precision)
        return conv_backward_bf16.weight_gradient(
            *conv_backward_bf16.routed_gradient(first, triton.route, triton.nhwc, s), triton.nhwc, s
        )

    return {
        "forward": (
            lambda: pictures.forward(x, w, bias, s, precision, False),
            lambda: convolution.forward(x, w, bias, s, precision, False),
        ),
        "gradients": (lambda: pictures.weight_gradient(first, route, x, s, precision), backward),
    }


def main() -> None:
    """Time all operations and write first_layers.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for first_layers.json")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    device = card(parser)
    rows = []
    for precision in ("tf32", "bf16"):
        for clients in (5, 50):
            for name, pair in ways(clients, precision).items():
                ours, triton = (recorded(way) for way in pair)
                turns = [(microseconds(ours), microseconds(triton)) for _ in range(options.turns)]
                medians = [round(statistics.median(times), 2) for times in zip(*turns, strict=True)]
                row = {"precision": precision, "clients": clients, "operation": name}
                rows.append(row | dict(zip(("cuda_us", "triton_us"), medians, strict=True)))
                print(rows[-1], flush=True)
    result = {
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "operations": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "first_layers.json", result)


if __name__ == "__main__":
    main()
