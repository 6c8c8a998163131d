"""All experiments of `pefll reproduce` except Table 1."""

from __future__ import annotations

from pefll.experiments import (
    certificates,
    descriptors,
    embedding,
    extrapolation,
    fl_bench,
    hypernetwork_size,
    label_masking,
    regularisation,
    resnet,
    shakespeare,
    training_cost,
    unlabeled,
)
from pefll.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        unlabeled,
        label_masking,
        hypernetwork_size,
        embedding,
        training_cost,
        descriptors,
        extrapolation,
        regularisation,
        resnet,
        fl_bench,
        shakespeare,
        certificates,
    )
}
