"""Tables, curves and pictures of runs, made only from run folders."""

from __future__ import annotations

from pefll.report.comparison import Comparison, compare
from pefll.report.federation import print_federation
from pefll.report.federation_plots import federation_picture
from pefll.report.plots import curves, descriptor_map
from pefll.report.runs import mean_and_std, mean_std_text
from pefll.report.show import show

__all__ = [
    "Comparison",
    "compare",
    "curves",
    "descriptor_map",
    "federation_picture",
    "mean_and_std",
    "mean_std_text",
    "print_federation",
    "show",
]
