"""Faster versions of plain functions: kernels, CUDA graphs, precision. Importing this package registers them.

See `pefll.core.reference`. Engines import this package; methods, tasks, data, models and core do not.
"""

from pefll.backend import alone, blocks, fused, keys, lstm, optim, samples, vectors

__all__ = ["alone", "blocks", "fused", "keys", "lstm", "optim", "samples", "vectors"]
