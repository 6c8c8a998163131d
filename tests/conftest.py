"""Before any test: Triton decides when it is imported whether it compiles kernels or interprets them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
