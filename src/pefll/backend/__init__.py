"""Faster versions of plain functions: kernels, CUDA graphs, precision. Importing this package registers them.

`pefll.core.reference` explains how. Engines import this package. Methods, tasks, data, models and core do not.
"""

from pefll.backend import alone, blocks, fused, keys, lstm, optim, samples, vectors

__all__ = ["alone", "blocks", "fused", "keys", "lstm", "optim", "samples", "vectors"]
