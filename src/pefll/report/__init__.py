"""Tables, curves and pictures of runs, made from their folders only."""

from __future__ import annotations

from pefll.report.descriptors import Descriptors, rank_correlation, read_descriptors, spearman
from pefll.report.federation import print_federation
from pefll.report.plots import curves, descriptor_map, federation_picture
from pefll.report.runs import SeedGroup, StoredRun, group_runs, mean_and_std, read_run, read_runs
from pefll.report.show import show
from pefll.report.table import costs_table, grouped_table, runs_table
from pefll.report.text import braille_plot, run_plot, sparkline, sparklines

__all__ = [
    "Descriptors",
    "SeedGroup",
    "StoredRun",
    "braille_plot",
    "costs_table",
    "curves",
    "descriptor_map",
    "federation_picture",
    "group_runs",
    "grouped_table",
    "mean_and_std",
    "print_federation",
    "rank_correlation",
    "read_descriptors",
    "read_run",
    "read_runs",
    "run_plot",
    "runs_table",
    "show",
    "sparkline",
    "sparklines",
    "spearman",
]
