"""Everything that is fast: kernels, recorded work, precision. It registers faster versions of plain functions.

See `pefll.core.reference`. Engines import this package; nothing below them does.
"""

from pefll.backend import alone, blocks, fused, keys, optim, samples, vectors

__all__ = ["alone", "blocks", "fused", "keys", "optim", "samples", "vectors"]
