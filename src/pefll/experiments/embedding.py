"""Compares an MLP, a ConvNet and a linear layer as embedding network (`tab:embedding_network_ablation`)."""

from __future__ import annotations

from pefll.experiments.experiment import CIFAR10, CIFAR100, Compared, Experiment, Point, Row, Statement, all_views

CELLS = (*CIFAR10, *CIFAR100)
ROWS = (
    Row("mlp", settings={"embedding": "mlp"}),
    Row("convnet", settings={"embedding": "convnet"}),
    Row("linear", settings={"embedding": "linear"}, data="cifar100"),
)
PAPER = {
    "mlp": ((88.5, 1.2), (87.8, 1.1), (87.5, 2.1), (59.1, 0.2), (53.4, 0.4), (51.2, 0.5)),
    "convnet": ((88.9, 0.7), (88.9, 0.3), (88.4, 0.4), (59.4, 0.2), (54.4, 0.3), (53.2, 0.3)),
}

EXPERIMENT = Experiment(
    name="embedding",
    title="Embedding networks",
    about="PeFLL with the settings of Table 1 and different embedding networks. The paper's figures use label "
    "masking, as its figures for the ConvNet on CIFAR-10 show. Table 1 uses the linear embedding on CIFAR-100; the "
    "paper's ablation does not include it.",
    cells=CELLS,
    rows=ROWS,
    panels=all_views(CELLS, ROWS, PAPER),
    statements=(
        Statement(
            "The ConvNet is better than the MLP in all experiments",
            "tab:embedding_network_ablation",
            [
                Compared(Point("convnet", cell, "seen", "masked"), Point("mlp", cell, "seen", "masked"))
                for cell in CELLS
            ],
        ),
        Statement(
            "On CIFAR-100, without masking, the linear embedding is better than the ConvNet",
            "sec:experiments, Models",
            [
                Compared(Point("linear", cell, group), Point("convnet", cell, group))
                for cell in CIFAR100
                for group in ("seen", "unseen")
            ],
        ),
    ),
)
