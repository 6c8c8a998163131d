"""How exact products of matrices are on a GPU: one setting for torch's own operations and for the kernels here."""

from __future__ import annotations

import torch

_KINDS = {"float32": "ieee", "tf32": "tf32", "bf16": "bf16"}
_bf16 = False


def products() -> str:
    """Return how kernels are to multiply float32 numbers: ieee, tf32 or bf16."""
    if _bf16:
        return "bf16"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
